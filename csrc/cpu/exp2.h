// What both exponentials share, that of values (activations.h) and that of vectors (floats.h).
#pragma once

namespace bertfast {

constexpr float kLog2e = 1.44269504f;

// 2^f = 1 + c[0] f + c[1] f^2 + ... for |f| <= 1/2, to 2e-8 of its value before rounding.
constexpr float kExp2Terms[] = {0.6931472f, 0.24022646f, 0.055503286f, 0.009618489f, 0.0013399932f, 0.00015345795f};

}  // namespace bertfast
