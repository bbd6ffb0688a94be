// Attention for x86-64 with AVX2.
#if defined(__x86_64__)
#include "attention.h"

#pragma GCC target("avx2,fma,f16c")
#define BERTFAST_ISA avx2
#define BERTFAST_OPERANDS "operands_fp32.h"
#define BERTFAST_LANES 8
#define BERTFAST_ROWS 6
#include "attention_bwd.h"
#include "attention_fwd.h"
#include "attention_mask_bwd.h"
#endif
