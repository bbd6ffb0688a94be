// One block's threads, as fibers of one thread of the host, and who of them runs next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "banks.h"
#include "device_limits.h"
#include "fibers.h"
#include "races.h"

namespace bertfast::emulator {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;

// Of literals, which are one object within a source file only.
inline bool same_text(const char* a, const char* b) {
  return a == b || std::strcmp(a, b) == 0;
}

struct Location {
  const char* file;
  int line;

  bool operator==(const Location& other) const { return line == other.line && same_text(file, other.file); }
};

std::string to_string(const Location& location);

// A copy that was issued and has not landed.
struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
  int group;
};

struct Thread {
  int index = 0;
  Fiber fiber;
  bool exited = false;
  const char* operation = nullptr;  // that it waits in
  Location location = {};
  uint32_t mask = 0;         // of the warp's operation that it waits in
  void* argument = nullptr;  // of that
  int barrier = -1;          // that it waits at
  size_t pieces = 0;         // of shared memory taken
  std::vector<AsyncCopy> copies;
  int copy_groups = 0;
  Clock clock;
};

struct Warp {
  uint32_t lanes = 0;     // that the block has
  uint32_t runnable = 0;  // of these
  uint32_t meeting = 0;   // of these: wait in an operation of the warp
  uint32_t exited = 0;    // of these
  BankLog banks;
};

struct Barrier {
  int threads = 0;  // that it waits for, 0 while nobody is there
  int arrived = 0;
  std::vector<int> waiting;
  std::vector<uint32_t> lanes;  // that arrived, by warp
  Clock latest;                 // of those who arrived
  Location location = {};
};

struct SharedPiece {
  int offset, bytes;
};

struct Block {
  const char* kernel = "";
  int threads_count = 0;
  int64_t x = 0, y = 0;
  int exited = 0;
  std::vector<Warp> warps;
  std::vector<Barrier> barriers;
  std::vector<unsigned char> shared_storage;
  unsigned char* shared = nullptr;
  int shared_bytes = 0;
  std::vector<SharedPiece> pieces;
};

extern Block block;
extern int64_t products;  // of 16 x 8 x 16, in this launch
// Null on the host: also on threads of it that are not the one that runs a launch. Not thread_local, which asks at each
// access whether it was initialised.
extern __thread Thread* current __attribute__((tls_model("initial-exec")));

Thread& thread(int index);

// Ends the launch with an error; the threads are abandoned where they are. On the host it throws at once.
[[noreturn]] void fail(const std::string& message);
[[noreturn]] void fail(const Thread& thread, const std::string& message);

// The current thread can go on later, or, after `wait`, once it is made runnable.
void yield();
void wait(const char* operation, Location location);
void run_next();
void make_runnable(Thread& thread);
void make_runnable(int warp, uint32_t lanes);

// Shared memory's accesses until the next thread switch that nothing but chance asks for.
extern int accesses_until_yield;
void yield_by_chance();

}  // namespace bertfast::emulator
