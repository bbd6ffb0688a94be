#include "emulator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "host.h"
#include "scheduler.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace bertfast::emulator {

Block block;
__thread Thread* current = nullptr;
int accesses_until_yield = 0;

namespace {

constexpr int kSharedAlignment = 1024;

struct Settings {
  uint64_t seed = 0;
  int64_t first_block = 0, blocks = INT64_MAX;
  int shared_limit = kMostShared;
  int multiprocessors = 4;
} settings;

struct Counters {
  int64_t launches, blocks, threads, requests, conflicts, wide_accesses, other_accesses, products;
} last_launch, total;

std::mutex one_launch;
std::vector<std::unique_ptr<Thread>> threads;
Fiber host;
std::string failure;
void (*body)(const void*);
const void* context;

// Later than whatever has happened.
Clock now;

void resume(Fiber& from, Thread& next) {
  current = &next;
  next.operation = nullptr;
  threadIdx.x = static_cast<unsigned>(next.index);
  if (&from != &next.fiber) from.switch_to(next.fiber);
}

[[noreturn]] void fail_by_deadlock() {
  std::map<std::pair<std::string, std::string>, int> waiting;
  for (int i = 0; i < block.threads_count; ++i) {
    const Thread& t = *threads[i];
    if (!t.exited) ++waiting[{t.operation, to_string(t.location)}];
  }
  std::string text = "deadlock:";
  const char* separator = " ";
  for (const auto& [where, count] : waiting) {
    text += separator + std::to_string(count) + " threads wait at " + where.first + " (" + where.second + ")";
    separator = ", ";
  }
  if (block.exited > 0) text += ", " + std::to_string(block.exited) + " have exited";
  fail(text);
}

void check_exit(const Thread& own) {
  if (!own.copies.empty()) {
    fail("exits with " + std::to_string(own.copies.size()) + " asynchronous copies that it never waited for");
  }
  const int first = own.index / kWarpSize * kWarpSize;
  Warp& warp = block.warps[own.index / kWarpSize];
  for (uint32_t left = warp.meeting; left != 0; left &= left - 1) {
    const Thread& other = *threads[first + __builtin_ctz(left)];
    if (other.mask >> own.index % kWarpSize & 1) {
      fail("exits while lane " + std::to_string(__builtin_ctz(left)) + " waits for it at " + other.operation + " (" +
           to_string(other.location) + ")");
    }
  }
  warp.exited |= 1u << own.index % kWarpSize;
  const Barrier& barrier = block.barriers[0];
  if (barrier.arrived > 0) {
    fail("exits while " + std::to_string(barrier.arrived) + " threads wait at sync_threads (" +
         to_string(barrier.location) + ")");
  }
}

// A fiber is one thread of block after block.
void run_threads(void* argument) {
  Thread& own = *static_cast<Thread*>(argument);
  for (;;) {
    body(context);
    settle_access();
    check_exit(own);
    own.exited = true;
    if (++block.exited == block.threads_count) {
      current = nullptr;
      own.fiber.switch_to(host);
    } else {
      run_next();
    }
  }
}

// So that nothing of one block is a race with something of the next.
void pass_time(const Clock& clock) {
  now.block = std::max(now.block, clock.block + 1);
  now.warp = std::max(now.warp, clock.warp + 1);
}

void begin_block(int64_t index, const Grid& grid) {
  block.x = index % grid.x;
  block.y = index / grid.x;
  block.exited = 0;
  block.pieces.clear();
  std::fill_n(block.shared, block.shared_bytes, 0xff);
  for (Barrier& barrier : block.barriers) {
    barrier.threads = barrier.arrived = 0;
    barrier.latest = {};
    barrier.waiting.clear();
    barrier.lanes.assign(block.warps.size(), 0);
  }
  for (int i = 0; i < block.threads_count; ++i) {
    Thread& t = *threads[i];
    pass_time(t.clock);
    t.exited = false;
    t.operation = nullptr;
    t.pieces = 0;
    t.copies.clear();
    t.copy_groups = 0;
  }
  for (size_t w = 0; w < block.warps.size(); ++w) {
    const int lanes = std::min(kWarpSize, block.threads_count - static_cast<int>(w) * kWarpSize);
    block.warps[w].lanes = block.warps[w].runnable = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    block.warps[w].meeting = block.warps[w].exited = 0;
    block.warps[w].banks.clear();
  }
  forget_accesses(now);
  schedule_block();
  blockIdx.x = static_cast<unsigned>(block.x);
  blockIdx.y = static_cast<unsigned>(block.y);
}

void run_block(int64_t index, const Grid& grid) {
  begin_block(index, grid);
  resume(host, *pick());
  if (!failure.empty()) return;
  for (size_t w = 0; w < block.warps.size(); ++w) block.warps[w].banks.flush(block.warps[w].lanes);
  ++last_launch.blocks;
  last_launch.threads += block.threads_count;
}

void begin_launch(const char* kernel, const Grid& grid) {
  block.kernel = kernel;
  block.threads_count = grid.threads;
  block.warps.resize((grid.threads + kWarpSize - 1) / kWarpSize);
  block.barriers.resize(16);
  block.shared_bytes = grid.shared;
  block.shared_storage.resize(settings.shared_limit + kSharedAlignment);
  const auto storage = reinterpret_cast<uintptr_t>(block.shared_storage.data());
  block.shared = block.shared_storage.data() + (kSharedAlignment - storage % kSharedAlignment) % kSharedAlignment;
  while (threads.size() < static_cast<size_t>(grid.threads)) threads.push_back(std::make_unique<Thread>());
  for (const auto& t : threads) pass_time(t->clock);
  for (int i = 0; i < grid.threads; ++i) {
    threads[i]->index = i;
    threads[i]->fiber.start(&run_threads, threads[i].get());
  }
  seed_scheduler(settings.seed);
  failure.clear();
  last_launch = {1};
  bank_counters = {};
  products = 0;
  global_log = {};
  threadIdx = {0, 0, 0};
  blockIdx = {0, 0, 0};
  blockDim = dim3(static_cast<unsigned>(grid.threads));
  gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
}

void check_grid(const char* kernel, const Grid& grid) {
  const auto refuse = [&](const std::string& what) { throw std::runtime_error(std::string(kernel) + ": " + what); };
  if (grid.x <= 0 || grid.y <= 0) refuse("the grid is empty");
  if (grid.threads <= 0 || grid.threads > kMaxThreads) refuse(std::to_string(grid.threads) + " threads in a block");
  if (grid.shared < 0 || grid.shared > settings.shared_limit) {
    refuse("asks for " + std::to_string(grid.shared) + " bytes of shared memory, a block can have " +
           std::to_string(settings.shared_limit));
  }
}

}  // namespace

Thread& thread(int index) {
  return *threads[index];
}

std::string to_string(const Location& location) {
  const std::string file = location.file;
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(location.line);
}

void fail(const std::string& message) {
  if (current == nullptr) throw std::runtime_error(message);
  fail(*current, message);
}

void fail(const Thread& thread, const std::string& message) {
  failure = std::string(block.kernel) + ": block (" + std::to_string(block.x) + ", " + std::to_string(block.y) +
            "), thread " + std::to_string(thread.index) + ": " + message;
  Thread& own = *current;
  current = nullptr;
  own.fiber.switch_to(host);
  __builtin_unreachable();
}

void run_next() {
  Thread& own = *current;
  Thread* next = pick();
  if (next == nullptr) fail_by_deadlock();
  resume(own.fiber, *next);
}

void wait(const char* operation, Location location) {
  current->operation = operation;
  current->location = location;
  run_next();
}

void run(const char* kernel, const Grid& grid, void (*thread_body)(const void*), const void* thread_context) {
  const std::lock_guard<std::mutex> lock(one_launch);
  check_grid(kernel, grid);
  begin_launch(kernel, grid);
  body = thread_body;
  context = thread_context;
  const int64_t first = std::min(settings.first_block, grid.x * grid.y);
  const int64_t count = std::min(settings.blocks, grid.x * grid.y - first);
  std::vector<int64_t> blocks(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) blocks[i] = first + i;
  for (int64_t i = count - 1; i > 0; --i) std::swap(blocks[i], blocks[random_bits() % (i + 1)]);
  for (const int64_t index : blocks) {
    run_block(index, grid);
    if (!failure.empty()) break;
  }
  last_launch.requests = bank_counters.requests;
  last_launch.conflicts = bank_counters.conflicts;
  last_launch.wide_accesses = global_log.wide;
  last_launch.other_accesses = global_log.other;
  last_launch.products = products;
  total.launches += 1;
  total.blocks += last_launch.blocks;
  total.threads += last_launch.threads;
  total.requests += last_launch.requests;
  total.conflicts += last_launch.conflicts;
  total.wide_accesses += last_launch.wide_accesses;
  total.other_accesses += last_launch.other_accesses;
  total.products += last_launch.products;
  if (!failure.empty()) throw std::runtime_error(failure);
}

int multiprocessors() {
  return settings.multiprocessors;
}

}  // namespace bertfast::emulator

#define BERTFAST_SETTING extern "C" __attribute__((visibility("default")))

BERTFAST_SETTING void bertfast_seed(uint64_t seed) {
  bertfast::emulator::settings.seed = seed;
}
BERTFAST_SETTING void bertfast_only_blocks(int64_t first, int64_t count) {
  bertfast::emulator::settings.first_block = first;
  bertfast::emulator::settings.blocks = count;
}
// Returns the limit that it replaces.
BERTFAST_SETTING int bertfast_multiprocessors(int count) {
  return std::exchange(bertfast::emulator::settings.multiprocessors, count);
}
BERTFAST_SETTING int bertfast_shared_limit(int bytes) {
  return std::exchange(bertfast::emulator::settings.shared_limit, bytes);
}
BERTFAST_SETTING void bertfast_check_races(bool enabled) {
  bertfast::emulator::check_races(enabled);
}
BERTFAST_SETTING void bertfast_forget_tensors() {
  bertfast::emulator::forget_tensors();
}
BERTFAST_SETTING void bertfast_know_tensor(const void* address, int64_t bytes) {
  bertfast::emulator::know_tensor(address, bytes);
}
// Of all launches and of the last, as `Counters` has them.
BERTFAST_SETTING void bertfast_counters(int64_t (&all)[8], int64_t (&last)[8]) {
  static_assert(sizeof(bertfast::emulator::Counters) == sizeof all, "a number for each");
  std::memcpy(all, &bertfast::emulator::total, sizeof all);
  std::memcpy(last, &bertfast::emulator::last_launch, sizeof last);
}
