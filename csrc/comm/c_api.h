// The shared-memory transport as C functions, for fastpar/comm/shared_memory/library.py.
//
// Not ops: a call through ctypes costs a microsecond, the dispatcher several, and a small collective takes less than
// one. A status other than 0 (CommStatus) comes with a text in fastpar_comm_error().
#pragma once

#include <cstdint>

#define FASTPAR_EXPORT __attribute__((visibility("default")))

extern "C" {

// The text that goes with the last status of this thread.
FASTPAR_EXPORT const char* fastpar_comm_error();

// ---- the ranks of a group on this host: create, tell the others pid, descriptor and nonce, connect, seal

FASTPAR_EXPORT void* fastpar_comm_create(int rank, int size, int ranks_on_host, int64_t slot_bytes);
FASTPAR_EXPORT int64_t fastpar_comm_descriptor(void* comm);
FASTPAR_EXPORT uint64_t fastpar_comm_nonce(void* comm);
FASTPAR_EXPORT int fastpar_comm_connect(void* comm, const int64_t* pids, const int64_t* descriptors,
                                        const uint64_t* nonces);
// What messages call the ranks (array by rank), where that is not 0, 1, 2, ...
FASTPAR_EXPORT void fastpar_comm_name_ranks(void* comm, const int64_t* names);
FASTPAR_EXPORT void fastpar_comm_seal(void* comm);
FASTPAR_EXPORT void fastpar_comm_destroy(void* comm);

// Asked by a blocking call of the main thread for long, on the main thread and on others; true: give up.
FASTPAR_EXPORT void fastpar_comm_set_interrupt_checks(bool (*on_main_thread)(), bool (*on_other_threads)());

// What is told of waits that last this long, in text; on the thread that waits.
FASTPAR_EXPORT void fastpar_comm_set_late_report(void (*report)(const char*), double seconds);
// That this process ends, and how, for the others: "normally", "with ValueError: ...". Before comm_destroy.
FASTPAR_EXPORT void fastpar_comm_note_exit(void* comm, const char* text);

// ---- calls. `spec`: op | dtype << 8 | reduction << 16 | root << 32. See `Call` for the rest.

FASTPAR_EXPORT int fastpar_comm_run(void* comm, int64_t spec, int64_t element_bytes, const void* input, void* output,
                                    int64_t count, const int64_t* sizes, const int64_t* output_sizes, double timeout);
// The ticket.
FASTPAR_EXPORT uint64_t fastpar_comm_submit(void* comm, int64_t spec, int64_t element_bytes, const void* input,
                                            void* output, int64_t count, const int64_t* sizes,
                                            const int64_t* output_sizes, double timeout);
// The first half of a call, and the second: see Progress::begin. The ticket, or 0 for an error with a text.
FASTPAR_EXPORT uint64_t fastpar_comm_begin(void* comm, int64_t spec, int64_t element_bytes, const void* input,
                                           void* output, int64_t count, const int64_t* sizes,
                                           const int64_t* output_sizes, double timeout);
FASTPAR_EXPORT int fastpar_comm_finish(void* comm, uint64_t ticket);
// 0: done; -1: not within `seconds`.
FASTPAR_EXPORT int fastpar_comm_wait(void* comm, uint64_t ticket, double seconds);
FASTPAR_EXPORT int fastpar_comm_done(void* comm, uint64_t ticket);

// ---- regions: memory of the same size on every rank, which all of them map

FASTPAR_EXPORT void* fastpar_region_create(int64_t bytes);
FASTPAR_EXPORT int64_t fastpar_region_descriptor(void* region);
FASTPAR_EXPORT int fastpar_region_connect(void* region, void* comm, const int64_t* pids, const int64_t* descriptors);
FASTPAR_EXPORT void fastpar_region_seal(void* region);
FASTPAR_EXPORT void* fastpar_region_address(void* region, int rank);
// Collectives no longer know it; the memory stays.
FASTPAR_EXPORT void fastpar_region_forget(void* region, void* comm);
FASTPAR_EXPORT void fastpar_region_destroy(void* region);

// ---- messages between two ranks of this host: create, tell the others pid, descriptor and nonce, connect, seal

FASTPAR_EXPORT void* fastpar_mail_create(int rank, int size, int ranks_on_host, int64_t arena_bytes);
FASTPAR_EXPORT int64_t fastpar_mail_descriptor(void* mail);
FASTPAR_EXPORT uint64_t fastpar_mail_nonce(void* mail);
FASTPAR_EXPORT int fastpar_mail_connect(void* mail, const int64_t* pids, const int64_t* descriptors,
                                        const uint64_t* nonces);
FASTPAR_EXPORT void fastpar_mail_seal(void* mail);
FASTPAR_EXPORT void fastpar_mail_destroy(void* mail);

// `spec`: for every tensor its address, its dtype (torch's number) | dims << 8, and its sizes.
FASTPAR_EXPORT int fastpar_mail_send(void* mail, int peer, int64_t tag, int64_t kind, const char* note,
                                     int64_t note_bytes, const int64_t* spec, int64_t num_tensors);
// `out` takes kind, number of tensors, bytes and address of the note, and the address of the tensors, which are
// DLManagedTensor* that the caller has to take over. What is at the addresses stays until the thread's next call.
FASTPAR_EXPORT int fastpar_mail_receive(void* mail, int peer, int64_t tag, double timeout, int64_t* out);
// Does not wait; -1: it is not there.
FASTPAR_EXPORT int fastpar_mail_receive_now(void* mail, int peer, int64_t tag, int64_t* out);
// 1, 0, or the negative of a status.
FASTPAR_EXPORT int fastpar_mail_ready(void* mail, int peer, int64_t tag);
FASTPAR_EXPORT int fastpar_mail_abort(void* mail, const char* reason);
FASTPAR_EXPORT void fastpar_mail_close(void* mail);
// Who has given up, after status kPeerFailed.
FASTPAR_EXPORT int fastpar_mail_failed_rank();
// Bytes of the own memory that are in use, and that ever were at once.
FASTPAR_EXPORT void fastpar_mail_stats(void* mail, int64_t* out);

// ---- for tests and benches

FASTPAR_EXPORT void fastpar_comm_tune(int64_t one_shot_bytes, int64_t chunk_bytes);
}
