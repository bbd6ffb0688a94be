// Attention for any machine.
#include "attention.h"

#define BERTFAST_ISA baseline
#define BERTFAST_OPERANDS "operands_fp32.h"
#define BERTFAST_LANES 4
#define BERTFAST_ROWS 6
#include "attention_bwd.h"
#include "attention_fwd.h"
#include "attention_mask_bwd.h"
