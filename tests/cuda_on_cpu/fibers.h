// Fibers: a CUDA thread is one. Boost.Context switches in nanoseconds; ucontext, which every libc has, makes a system
// call each time.
#pragma once

#ifdef BERTFAST_UCONTEXT
#include <ucontext.h>
#else
#include <boost/context/detail/fcontext.hpp>
#endif

namespace bertfast::emulator {

class Fiber {
 public:
  using Body = void (*)(void* argument);

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // From its first switch on the fiber runs body(argument), which must never return. Whatever the fiber was in the
  // middle of is abandoned.
  void start(Body body, void* argument);

  // Leaves this fiber, which must be the running one, for another.
  void switch_to(Fiber& other);

 private:
#ifdef BERTFAST_UCONTEXT
  static void enter();

  ucontext_t context_;
#else
  static void enter(boost::context::detail::transfer_t from);

  boost::context::detail::fcontext_t context_ = nullptr;
#endif
  void* stack_ = nullptr;
  Body body_ = nullptr;
  void* argument_ = nullptr;
};

}  // namespace bertfast::emulator
