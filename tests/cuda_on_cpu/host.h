// What ops ask of the device, and their tensors, for pointers of kernels to find theirs by the address.
#pragma once

#include <cstdint>

namespace bertfast::emulator {

int multiprocessors();
void forget_tensors();
void know_tensor(const void* address, int64_t bytes);

}  // namespace bertfast::emulator
