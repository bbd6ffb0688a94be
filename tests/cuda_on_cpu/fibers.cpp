#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace bertfast::emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

size_t guard_bytes() {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

// Memory that is only taken where it is touched, above a page that faults.
void* new_stack() {
  void* memory = mmap(nullptr, kStackBytes + guard_bytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, guard_bytes(), PROT_NONE);
  return static_cast<char*>(memory) + guard_bytes();
}

// Whose switch is under way: who arrives saves where that fiber was left.
Fiber* leaving = nullptr;
Fiber* arriving = nullptr;

}  // namespace

Fiber::~Fiber() {
  if (stack_ != nullptr) munmap(static_cast<char*>(stack_) - guard_bytes(), kStackBytes + guard_bytes());
}

#ifdef BERTFAST_UCONTEXT

void Fiber::enter() {
  arriving->body_(arriving->argument_);
}

void Fiber::start(Body body, void* argument) {
  if (stack_ == nullptr) stack_ = new_stack();
  body_ = body;
  argument_ = argument;
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::enter, 0);
}

void Fiber::switch_to(Fiber& other) {
  arriving = &other;
  swapcontext(&context_, &other.context_);
}

#else

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

void Fiber::enter(transfer_t from) {
  leaving->context_ = from.fctx;
  arriving->body_(arriving->argument_);
}

void Fiber::start(Body body, void* argument) {
  if (stack_ == nullptr) stack_ = new_stack();
  body_ = body;
  argument_ = argument;
  context_ = make_fcontext(static_cast<char*>(stack_) + kStackBytes, kStackBytes, &Fiber::enter);
}

void Fiber::switch_to(Fiber& other) {
  leaving = this;
  arriving = &other;
  const transfer_t from = jump_fcontext(other.context_, nullptr);
  leaving->context_ = from.fctx;
}

#endif

}  // namespace bertfast::emulator
