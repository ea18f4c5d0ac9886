/* What the headers of a newer C library make of our sources, for systems whose C library lacks it. Linked into the
 * library of a manylinux wheel only (portable.py), where it hides behind no name that others see. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* glibc 2.32; libstdc++ leaves atomics out where it is 1, which it may always be 0. */
char __libc_single_threaded = 0;

/* glibc 2.33; before, the headers called __fxstat. */
int fstat(int descriptor, struct stat* status) { return (int)syscall(SYS_fstat, descriptor, status); }

/* glibc 2.30; before, libstdc++ did this itself: it looks at its own clock again after every wake-up. */
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  const long kSecond = 1000000000L;
  struct timespec now, real;
  if (clock == CLOCK_REALTIME) return pthread_cond_timedwait(condition, mutex, until);
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += until->tv_sec - now.tv_sec;
  real.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += kSecond;
    real.tv_sec -= 1;
  } else if (real.tv_nsec >= kSecond) {
    real.tv_nsec -= kSecond;
    real.tv_sec += 1;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}
