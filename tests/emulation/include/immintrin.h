/* Stands before the compiler's <immintrin.h> in an emulated build and puts software models in place of the intrinsics
 * that the machine lacks. An intrinsic that has no model keeps the compiler's definition, which does not compile for
 * the reduced target of x86_model.h ("target specific option mismatch"): nothing falls through in silence. */
#pragma GCC system_header
#include_next <immintrin.h>

#ifndef NUMKONG_EMULATION_IMMINTRIN_H
#define NUMKONG_EMULATION_IMMINTRIN_H

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#if NK_MODEL_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <x86/avx512.h>
#include "../avx512_model.h"
#endif
#include "../dot_model.h"
#include "../amx_model.h"
#pragma GCC pop_options

#endif
