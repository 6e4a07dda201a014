/* Force-included (-include) into an emulated build of the package: lets rows run on a machine that lacks their
 * instructions.
 *
 * A row's kernels are compiled for instructions that this machine has, and the shim in include/immintrin.h replaces the
 * intrinsics that it lacks by software models:
 *
 *      alder        AVX-VNNI  dot_model.h, on AVX2
 *      icelake      AVX-512   SIMDe and avx512_model.h, on AVX2   } native where NK_MODEL_AVX512 is 0
 *      genoa        + BF16    dot_model.h, on FMA                 }
 *      sapphireamx  AMX       amx_model.h
 *
 * NK_EMULATED tells the sources to spell instructions as intrinsics (no inline assembly) and to ask no operating system
 * for AMX; NK_EMULATED_CAPABILITIES is what the capability functions report beyond the machine's own. build.py sets
 * NK_MODEL_AVX512 from the machine's flags. It says nothing about speed: a modelled row is 2 to 100 times slower.
 */
#ifndef NUMKONG_EMULATION_X86_MODEL_H
#define NUMKONG_EMULATION_X86_MODEL_H

#ifndef NK_MODEL_AVX512
#define NK_MODEL_AVX512 1
#endif

#define NK_EMULATED 1

#define NK_ALDER_TARGET "avx2,fma,f16c"
#if NK_MODEL_AVX512
#define NK_ICELAKE_TARGET "avx2,fma,f16c"
#define NK_GENOA_TARGET "avx2,fma,f16c"
#define NK_SAPPHIREAMX_TARGET "avx2,fma,f16c"
#define NK_EMULATED_AVX512_                                                                                            \
    (NK_CAP(avx512f) | NK_CAP(avx512bw) | NK_CAP(avx512dq) | NK_CAP(avx512vl) | NK_CAP(avx512vnni) | NK_CAP(avx512bf16))
#else
#define NK_SAPPHIREAMX_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define NK_EMULATED_AVX512_ 0
#endif
#define NK_EMULATED_CAPABILITIES                                                                                       \
    (NK_CAP(avxvnni) | NK_EMULATED_AVX512_ | NK_CAP(amxtile) | NK_CAP(amxint8) | NK_CAP(amxbf16))

#endif
