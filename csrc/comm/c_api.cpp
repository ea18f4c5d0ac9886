#include "comm/c_api.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/dlpack.h"
#include "comm/mailbox.h"
#include "comm/progress.h"
#include "runtime/shared_segment.h"

namespace {

using fastpar::Call;
using fastpar::CommFailure;
using fastpar::CommStatus;
using fastpar::Progress;
using fastpar::SharedSegment;

std::string& error_text() {
  thread_local std::string text;
  return text;
}

template <typename Action>
int status_of(Action&& action) {
  try {
    action();
    return 0;
  } catch (const CommFailure& failure) {
    error_text() = failure.what();
    return static_cast<int>(failure.status());
  } catch (const std::exception& error) {
    error_text() = error.what();
    return static_cast<int>(CommStatus::kError);
  }
}

struct InterruptChecks {
  fastpar::InterruptCheck on_main_thread, on_other_threads;
};
InterruptChecks& interrupt_checks() {
  static InterruptChecks checks{};
  return checks;
}

// Signals are handled on the main thread only, and two threads must not be in its check at once.
fastpar::InterruptCheck interrupt_check_here() {
  thread_local const bool is_main_thread = syscall(SYS_gettid) == getpid();
  return is_main_thread ? interrupt_checks().on_main_thread : interrupt_checks().on_other_threads;
}

Progress& progress(void* comm) { return *static_cast<Progress*>(comm); }

Call call_of(int64_t spec, int64_t element_bytes, const void* input, void* output, int64_t count, const int64_t* sizes,
             const int64_t* output_sizes, double timeout) {
  return {static_cast<fastpar::CommOp>(spec & 0xff),
          static_cast<uint8_t>(spec >> 8),
          static_cast<fastpar::Reduction>(spec >> 16 & 0xff),
          static_cast<int32_t>(spec >> 32),
          element_bytes,
          input,
          output,
          count,
          sizes,
          output_sizes,
          timeout};
}

struct Region {
  SharedSegment own;
  std::vector<SharedSegment> peers;
  std::vector<char*> addresses;
  uint64_t id = 0;
};

Region& region_of(void* region) { return *static_cast<Region*>(region); }

fastpar::Mailbox& mailbox(void* mail) { return *static_cast<fastpar::Mailbox*>(mail); }

// What the last fastpar_mail_receive() of this thread has given out.
struct Received {
  std::string note;
  std::vector<fastpar::DlManagedTensor*> tensors;
};
Received& received_here() {
  thread_local Received received;
  return received;
}

void give_out(fastpar::Mail&& mail, int64_t* out) {
  Received& received = received_here();
  received.note = std::move(mail.note);
  received.tensors.clear();
  for (auto& loan : mail.tensors) received.tensors.push_back(fastpar::to_dlpack(std::move(loan)));
  out[0] = mail.kind;
  out[1] = static_cast<int64_t>(received.tensors.size());
  out[2] = static_cast<int64_t>(received.note.size());
  out[3] = reinterpret_cast<int64_t>(received.note.data());
  out[4] = reinterpret_cast<int64_t>(received.tensors.data());
}

}  // namespace

const char* fastpar_comm_error() { return error_text().c_str(); }

void* fastpar_comm_create(int rank, int size, int ranks_on_host, int64_t slot_bytes) {
  Progress* created = nullptr;
  status_of([&] { created = new Progress({rank, size, ranks_on_host, static_cast<size_t>(slot_bytes)}); });
  return created;
}

int64_t fastpar_comm_descriptor(void* comm) { return progress(comm).world().descriptor(); }
uint64_t fastpar_comm_nonce(void* comm) { return progress(comm).world().nonce(); }

int fastpar_comm_connect(void* comm, const int64_t* pids, const int64_t* descriptors, const uint64_t* nonces) {
  return status_of([&] { progress(comm).world().connect(pids, descriptors, nonces); });
}

void fastpar_comm_name_ranks(void* comm, const int64_t* names) { progress(comm).world().name_ranks(names); }
void fastpar_comm_seal(void* comm) { progress(comm).world().seal(); }
void fastpar_comm_destroy(void* comm) { delete static_cast<Progress*>(comm); }
void fastpar_comm_set_interrupt_checks(bool (*on_main_thread)(), bool (*on_other_threads)()) {
  interrupt_checks() = {on_main_thread, on_other_threads};
}

void fastpar_comm_set_late_report(void (*report)(const char*), double seconds) {
  fastpar::late_reporter().set(report, seconds);
}

void fastpar_comm_note_exit(void* comm, const char* text) { progress(comm).world().note_exit(text); }

int fastpar_comm_run(void* comm, int64_t spec, int64_t element_bytes, const void* input, void* output, int64_t count,
                     const int64_t* sizes, const int64_t* output_sizes, double timeout) {
  return status_of([&] {
    progress(comm).run(call_of(spec, element_bytes, input, output, count, sizes, output_sizes, timeout),
                       interrupt_check_here());
  });
}

uint64_t fastpar_comm_submit(void* comm, int64_t spec, int64_t element_bytes, const void* input, void* output,
                             int64_t count, const int64_t* sizes, const int64_t* output_sizes, double timeout) {
  return progress(comm).submit(call_of(spec, element_bytes, input, output, count, sizes, output_sizes, timeout));
}

uint64_t fastpar_comm_begin(void* comm, int64_t spec, int64_t element_bytes, const void* input, void* output,
                            int64_t count, const int64_t* sizes, const int64_t* output_sizes, double timeout) {
  uint64_t ticket = 0;
  status_of([&] {
    ticket = progress(comm).begin(call_of(spec, element_bytes, input, output, count, sizes, output_sizes, timeout));
  });
  return ticket;
}

int fastpar_comm_finish(void* comm, uint64_t ticket) {
  return status_of([&] { progress(comm).finish(ticket, interrupt_check_here()); });
}

int fastpar_comm_wait(void* comm, uint64_t ticket, double seconds) {
  bool is_done = false;
  const int status = status_of([&] { is_done = progress(comm).wait(ticket, seconds); });
  return status != 0 || is_done ? status : -1;
}

int fastpar_comm_done(void* comm, uint64_t ticket) { return progress(comm).done(ticket); }

void* fastpar_region_create(int64_t bytes) {
  Region* created = nullptr;
  status_of([&] {
    auto region = std::make_unique<Region>();
    region->own = SharedSegment::create(static_cast<size_t>(bytes));
    created = region.release();
  });
  return created;
}

int64_t fastpar_region_descriptor(void* region) { return region_of(region).own.descriptor(); }

int fastpar_region_connect(void* handle, void* comm, const int64_t* pids, const int64_t* descriptors) {
  return status_of([&] {
    Region& region = region_of(handle);
    fastpar::World& world = progress(comm).world();
    std::vector<SharedSegment> peers(static_cast<size_t>(world.size()));
    std::vector<char*> addresses;
    for (int rank = 0; rank < world.size(); ++rank) {
      SharedSegment& peer = peers[static_cast<size_t>(rank)];
      if (rank != world.rank()) {
        peer = SharedSegment::open(static_cast<pid_t>(pids[rank]), static_cast<int>(descriptors[rank]),
                                   region.own.bytes());
      }
      addresses.push_back(rank == world.rank() ? region.own.address() : peer.address());
    }
    region.peers = std::move(peers);
    region.addresses = std::move(addresses);
    region.id = world.add_region(region.addresses, region.own.bytes());
  });
}

void fastpar_region_seal(void* region) { region_of(region).own.close_descriptor(); }
void* fastpar_region_address(void* region, int rank) { return region_of(region).addresses[static_cast<size_t>(rank)]; }

void fastpar_region_forget(void* handle, void* comm) { progress(comm).world().remove_region(region_of(handle).id); }

void fastpar_region_destroy(void* region) { delete static_cast<Region*>(region); }

void* fastpar_mail_create(int rank, int size, int ranks_on_host, int64_t arena_bytes) {
  fastpar::Mailbox* created = nullptr;
  status_of([&] { created = new fastpar::Mailbox({rank, size, ranks_on_host, static_cast<size_t>(arena_bytes)}); });
  return created;
}

int64_t fastpar_mail_descriptor(void* mail) { return mailbox(mail).descriptor(); }
uint64_t fastpar_mail_nonce(void* mail) { return mailbox(mail).nonce(); }

int fastpar_mail_connect(void* mail, const int64_t* pids, const int64_t* descriptors, const uint64_t* nonces) {
  return status_of([&] { mailbox(mail).connect(pids, descriptors, nonces); });
}

void fastpar_mail_seal(void* mail) { mailbox(mail).seal(); }
void fastpar_mail_destroy(void* mail) { delete static_cast<fastpar::Mailbox*>(mail); }

int fastpar_mail_send(void* mail, int peer, int64_t tag, int64_t kind, const char* note, int64_t note_bytes,
                      const int64_t* spec, int64_t num_tensors) {
  return status_of([&] {
    std::vector<fastpar::Enclosure> tensors(static_cast<size_t>(num_tensors));
    for (fastpar::Enclosure& tensor : tensors) {
      tensor.address = reinterpret_cast<const void*>(spec[0]);
      tensor.dtype = static_cast<uint8_t>(spec[1] & 0xff);
      tensor.dims = static_cast<int>(spec[1] >> 8);
      tensor.sizes = spec + 2;
      tensor.bytes = fastpar::dl_type(tensor.dtype).bits / 8;
      for (int dim = 0; dim < tensor.dims; ++dim) tensor.bytes *= tensor.sizes[dim];
      spec += 2 + tensor.dims;
    }
    mailbox(mail).send(peer, tag, kind, std::string(note, static_cast<size_t>(note_bytes)), tensors);
  });
}

int fastpar_mail_receive(void* mail, int peer, int64_t tag, double timeout, int64_t* out) {
  return status_of([&] { give_out(mailbox(mail).receive(peer, tag, timeout, interrupt_check_here()), out); });
}

int fastpar_mail_receive_now(void* mail, int peer, int64_t tag, int64_t* out) {
  bool is_there = false;
  const int status = status_of([&] {
    std::optional<fastpar::Mail> found = mailbox(mail).receive_now(peer, tag);
    is_there = found.has_value();
    if (is_there) give_out(std::move(*found), out);
  });
  return status != 0 || is_there ? status : -1;
}

int fastpar_mail_ready(void* mail, int peer, int64_t tag) {
  bool is_ready = false;
  const int status = status_of([&] { is_ready = mailbox(mail).is_ready(peer, tag); });
  return status != 0 ? -status : is_ready;
}

int fastpar_mail_abort(void* mail, const char* reason) {
  return status_of([&] { mailbox(mail).abort(reason); });
}

void fastpar_mail_close(void* mail) { mailbox(mail).close(); }
int fastpar_mail_failed_rank() { return fastpar::Mailbox::failed_rank(); }

void fastpar_mail_stats(void* mail, int64_t* out) {
  const fastpar::MailboxStats stats = mailbox(mail).stats();
  out[0] = static_cast<int64_t>(stats.used_bytes);
  out[1] = static_cast<int64_t>(stats.touched_bytes);
}

void fastpar_comm_tune(int64_t one_shot_bytes, int64_t chunk_bytes) {
  fastpar::tuning() = {one_shot_bytes, chunk_bytes};
}
