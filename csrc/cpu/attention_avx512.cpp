// Attention for x86-64 with AVX-512.
#if defined(__x86_64__)
#include "attention.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define BERTFAST_ISA avx512
#define BERTFAST_OPERANDS "operands_fp32.h"
#define BERTFAST_LANES 16
#define BERTFAST_ROWS 12
#include "attention_bwd.h"
#include "attention_fwd.h"
#include "attention_mask_bwd.h"
#endif
