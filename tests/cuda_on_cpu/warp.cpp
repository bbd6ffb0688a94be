#include "warp.h"

#include <algorithm>
#include <cstdio>
#include <string>

namespace bertfast::emulator {
namespace {

std::string lanes_text(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

std::string place(const char* operation, Location location) {
  return std::string(operation) + " (" + to_string(location) + ")";
}

void check_participation(const char* operation, int id, int threads) {
  if (id < 0 || id > 15) fail(std::string(operation) + ": barrier " + std::to_string(id) + ", there are 0 to 15");
  if (threads <= 0 || threads % kWarpSize != 0 || block.threads_count % kWarpSize != 0 ||
      threads > block.threads_count) {
    fail(std::string(operation) + " of " + std::to_string(threads) + " threads: takes whole warps, and no more than " +
         "the block's " + std::to_string(block.threads_count));
  }
}

void release(Barrier& barrier, int id) {
  for (size_t w = 0; w < block.warps.size(); ++w) {
    if (barrier.lanes[w] != 0 && barrier.lanes[w] != block.warps[w].lanes) {
      fail("barrier " + std::to_string(id) + " in divergent code: of warp " + std::to_string(w) + " only lanes " +
           lanes_text(barrier.lanes[w]) + " came");
    }
    if (barrier.lanes[w] != 0) block.warps[w].banks.flush(barrier.lanes[w]);
  }
  const Clock after{barrier.latest.block + 1, barrier.latest.warp + 1};
  current->clock = after;
  for (const int index : barrier.waiting) {
    thread(index).clock = after;
    make_runnable(thread(index));
  }
  barrier.threads = barrier.arrived = 0;
  barrier.waiting.clear();
  barrier.lanes.assign(block.warps.size(), 0);
  barrier.latest = {};
}

Clock later(Clock a, Clock b) {
  return {std::max(a.block, b.block), std::max(a.warp, b.warp)};
}

void check_mask(const char* operation, uint32_t mask, Location location) {
  if ((mask >> current->index % kWarpSize & 1) == 0)
    fail(place(operation, location) + ": the mask " + lanes_text(mask) + " leaves the caller out");
  if ((mask & ~block.warps[current->index / kWarpSize].lanes) != 0) {
    fail(place(operation, location) + ": the mask " + lanes_text(mask) + " has lanes that the block has not");
  }
}

}  // namespace

void arrive(const char* operation, int id, int threads, bool waits, Location location) {
  settle_access();
  if (id != 0) check_participation(operation, id, threads);
  Barrier& barrier = block.barriers[id];
  const auto here = [&] { return place(operation, location); };
  if (id == 0 && block.exited > 0) {
    fail("waits at " + here() + ", but " + std::to_string(block.exited) + " threads have exited");
  }
  if (barrier.threads == 0) {
    barrier.threads = threads;
    barrier.location = location;
  } else if (barrier.threads != threads) {
    fail(here() + " takes " + std::to_string(threads) + " threads, but another thread said " +
         std::to_string(barrier.threads) + " for barrier " + std::to_string(id) + " at " + to_string(barrier.location));
  } else if (id == 0 && !(barrier.location == location)) {
    fail("waits at " + here() + " while others wait at " + place(operation, barrier.location));
  }
  uint32_t& lanes = barrier.lanes[current->index / kWarpSize];
  const uint32_t bit = 1u << current->index % kWarpSize;
  if (lanes & bit) fail("comes to barrier " + std::to_string(id) + " again before the others came: " + here());
  lanes |= bit;
  barrier.latest = later(barrier.latest, current->clock);
  if (++barrier.arrived == threads) {
    release(barrier, id);
    if (waits) yield();
  } else if (!waits) {
    // What this thread does from here on is not ordered with what the others do behind the barrier.
    current->clock = {current->clock.block + 1, current->clock.warp + 1};
  } else {
    barrier.waiting.push_back(current->index);
    wait(operation, location);
  }
}

void meet(const char* operation, uint32_t mask, void* argument, Complete complete, Location location) {
  settle_access();
  const int first = current->index / kWarpSize * kWarpSize;
  const uint32_t own = 1u << current->index % kWarpSize;
  Warp& warp = block.warps[current->index / kWarpSize];
  check_mask(operation, mask, location);
  if (mask & warp.exited) {
    fail(place(operation, location) + " waits for lanes " + lanes_text(mask & warp.exited) + ", which have exited");
  }
  // Those who are there agree with each other, so that one stands for all.
  if (const uint32_t here = mask & warp.meeting) {
    const Thread& other = thread(first + __builtin_ctz(here));
    if (!same_text(other.operation, operation) || other.mask != mask || !(other.location == location)) {
      fail("lanes of one warp disagree: " + place(operation, location) + " with mask " + lanes_text(mask) +
           ", but lane " + std::to_string(__builtin_ctz(here)) + " is at " + place(other.operation, other.location) +
           " with mask " + lanes_text(other.mask));
    }
  }
  current->argument = argument;
  if ((mask & warp.meeting) != (mask & ~own)) {
    current->mask = mask;
    warp.meeting |= own;
    wait(operation, location);
    return;
  }
  void* lanes[kWarpSize] = {};
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    lanes[__builtin_ctz(left)] = thread(first + __builtin_ctz(left)).argument;
  }
  warp.banks.flush(mask);
  complete(lanes, mask);
  warp.meeting &= ~mask;
  make_runnable(current->index / kWarpSize, mask);
  run_next();
}

void order_lanes(uint32_t mask, Location location) {
  const auto complete = [](void*(&lanes)[kWarpSize], uint32_t all) {
    uint32_t latest = 0;
    for (uint32_t left = all; left != 0; left &= left - 1) {
      latest = std::max(latest, static_cast<Thread*>(lanes[__builtin_ctz(left)])->clock.warp);
    }
    for (uint32_t left = all; left != 0; left &= left - 1) {
      static_cast<Thread*>(lanes[__builtin_ctz(left)])->clock.warp = latest + 1;
    }
  };
  meet("sync_warp", mask, current, complete, location);
}

void exchange(const char* operation, uint32_t mask, Exchange& own, Location location) {
  check_mask(operation, mask, location);
  if ((mask >> own.source & 1) == 0) {
    fail(place(operation, location) + " reads from lane " + std::to_string(own.source) + ", which the mask " +
         lanes_text(mask) + " leaves out");
  }
  const auto complete = [](void*(&lanes)[kWarpSize], uint32_t all) {
    for (uint32_t left = all; left != 0; left &= left - 1) {
      Exchange& to = *static_cast<Exchange*>(lanes[__builtin_ctz(left)]);
      to.received = static_cast<Exchange*>(lanes[to.source])->given;
    }
  };
  meet(operation, mask, &own, complete, location);
}

uint32_t vote(uint32_t mask, bool predicate, Location location) {
  struct Vote {
    bool given;
    uint32_t result;
  } own{predicate, 0};
  const auto complete = [](void*(&lanes)[kWarpSize], uint32_t all) {
    uint32_t result = 0;
    for (uint32_t left = all; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (static_cast<Vote*>(lanes[lane])->given) result |= 1u << lane;
    }
    for (uint32_t left = all; left != 0; left &= left - 1)
      static_cast<Vote*>(lanes[__builtin_ctz(left)])->result = result;
  };
  meet("ballot", mask, &own, complete, location);
  return own.result;
}

}  // namespace bertfast::emulator
