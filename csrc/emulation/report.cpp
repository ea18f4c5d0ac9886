// Who waits where, in words.
#include "emulation/state.h"

namespace fastpar {
namespace emulation {

std::string describe(const uint3& index) {
  std::ostringstream text;
  text << "(" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

std::string describe(const Thread& thread) {
  std::ostringstream text;
  text << "thread " << thread.index << " of block " << describe(thread.block->index);
  return text.str();
}

std::string describe(const Place& place) {
  const char* name = std::strrchr(place.file, '/');
  std::ostringstream text;
  text << (name != nullptr ? name + 1 : place.file) << ":" << place.line;
  return text.str();
}

const char* name_of(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::kSync:
      return "__syncwarp";
    case WarpOperation::kShuffle:
      return "__shfl_sync";
    case WarpOperation::kBallot:
      return "__ballot_sync";
    case WarpOperation::kAll:
      return "__all_sync";
    case WarpOperation::kAny:
      return "__any_sync";
  }
  return "";
}

static std::string state_of(const Thread& thread) {
  std::ostringstream text;
  switch (thread.wait) {
    case Wait::kNothing:
      text << "can run";
      break;
    case Wait::kBarrier:
      text << "wait in __syncthreads at " << describe(thread.place);
      break;
    case Wait::kWarp:
      text << "wait in " << name_of(thread.operation) << " with mask 0x" << std::hex << thread.mask << std::dec
           << " at " << describe(thread.place);
      break;
    case Wait::kCluster:
      text << "wait for the cluster at " << describe(thread.place);
      break;
    case Wait::kEnded:
      text << "have ended";
      break;
  }
  return text.str();
}

// "threads 0-3, 5 wait in ...; threads 4 have ended", for every block of the cluster.
std::string who_waits_where(const Cluster& cluster) {
  std::ostringstream text;
  for (const auto& block : cluster.blocks) {
    std::map<std::string, std::vector<unsigned>> groups;
    for (const Thread& thread : block->threads) groups[state_of(thread)].push_back(thread.index);
    text << "\n  block " << describe(block->index) << ":";
    for (const auto& [state, threads] : groups) {
      text << "\n    threads ";
      for (size_t i = 0; i < threads.size(); ++i) {
        size_t last = i;
        while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
        text << (i > 0 ? ", " : "") << threads[i];
        if (last > i) text << "-" << threads[last];
        i = last;
      }
      text << " " << state;
    }
  }
  return text.str();
}

std::string who_waits_where() {
  std::string text;
  for (const auto& grid : machine().grids) {
    if (!grid) continue;
    if (machine().grids.size() > 1) text += "\n stream " + std::to_string(&grid - machine().grids.data()) + ":";
    for (const auto& cluster : grid->resident) text += who_waits_where(*cluster);
    if (grid->next_block < grid->num_blocks) {
      text += "\n  " + std::to_string(grid->num_blocks - grid->next_block) + " blocks are not resident";
    }
  }
  return text;
}

}  // namespace emulation
}  // namespace fastpar
