// What threads do together: barriers and the operations of a warp. Each says from where it was called, because threads
// that meet must come from the same place.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime.h"

#define BERTFAST_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace bertfast {

namespace emulator {

void arrive(const char* operation, int barrier, int threads, bool waits, Location location);

// Waits for all lanes of `mask`; complete(lanes, mask) runs once, when all are here. `lanes` has each one's argument.
using Complete = void (*)(void* (&lanes)[kWarpSize], uint32_t mask);
void meet(const char* operation, uint32_t mask, void* argument, Complete complete, Location location);

// sync_warp
void order_lanes(uint32_t mask, Location location);

struct Exchange {
  uint64_t given = 0;
  int source = 0;
  uint64_t received = 0;
};
void exchange(const char* operation, uint32_t mask, Exchange& own, Location location);

template <class T>
T exchange(const char* operation, uint32_t mask, T value, int source, Location location) {
  static_assert(sizeof(T) <= 8, "shuffles move 8 bytes at most");
  Exchange own;
  std::memcpy(&own.given, &value, sizeof(T));
  own.source = source;
  exchange(operation, mask, own, location);
  std::memcpy(&value, &own.received, sizeof(T));
  return value;
}

uint32_t vote(uint32_t mask, bool predicate, Location location);

}  // namespace emulator

inline int lane() {
  return emulator::current->index % kWarpSize;
}
inline int warp() {
  return emulator::current->index / kWarpSize;
}

inline void sync_threads(BERTFAST_HERE) {
  emulator::arrive("sync_threads", 0, emulator::block.threads_count, true, {file, line});
}
inline void named_barrier_sync(int id, int threads, BERTFAST_HERE) {
  emulator::arrive("named_barrier_sync", id, threads, true, {file, line});
}
inline void named_barrier_arrive(int id, int threads, BERTFAST_HERE) {
  emulator::arrive("named_barrier_arrive", id, threads, false, {file, line});
}
inline void sync_warp(uint32_t mask = kFullWarp, BERTFAST_HERE) {
  emulator::order_lanes(mask, {file, line});
}

// As on the device, sources count modulo the warp size; without a lane `delta` further down a lane keeps its value.
template <class T>
T shuffle(T value, int source, uint32_t mask = kFullWarp, BERTFAST_HERE) {
  return emulator::exchange("shuffle", mask, value, source & (kWarpSize - 1), {file, line});
}
template <class T>
T shuffle_xor(T value, int lane_mask, uint32_t mask = kFullWarp, BERTFAST_HERE) {
  return emulator::exchange("shuffle_xor", mask, value, (lane() ^ lane_mask) & (kWarpSize - 1), {file, line});
}
template <class T>
T shuffle_down(T value, int delta, uint32_t mask = kFullWarp, BERTFAST_HERE) {
  const int source = lane() + delta < kWarpSize ? lane() + delta : lane();
  return emulator::exchange("shuffle_down", mask, value, source, {file, line});
}
inline int uniform(int value, BERTFAST_HERE) {
  const int first = emulator::exchange("uniform", kFullWarp, value, 0, {file, line});
  if (value != first) {
    emulator::fail("uniform (" + emulator::to_string({file, line}) + ") is given " + std::to_string(value) +
                   ", but by lane 0 " + std::to_string(first));
  }
  return value;
}
inline uint32_t ballot(bool predicate, uint32_t mask = kFullWarp, BERTFAST_HERE) {
  return emulator::vote(mask, predicate, {file, line});
}

}  // namespace bertfast
