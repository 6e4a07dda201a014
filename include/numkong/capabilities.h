/* numkong/capabilities.h: one bit per instruction-set extension that a backend row can require, and the three masks:
 * what the machine has (and its operating system saves), what was compiled in, and what is enabled. */
#ifndef NUMKONG_CAPABILITIES_H
#define NUMKONG_CAPABILITIES_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef nk_u64_t nk_capability_t;

/* X(name, bit): the single list of capabilities; the enumerators, their names and Python's IntFlag come from it. */
#define NK_CAPABILITIES(X)                                                                                             \
    X(serial, 0)                                                                                                       \
    X(avx2, 1)                                                                                                         \
    X(fma, 2)                                                                                                          \
    X(f16c, 3)                                                                                                         \
    X(avxvnni, 4)                                                                                                      \
    X(avx512f, 5)                                                                                                      \
    X(avx512bw, 6)                                                                                                     \
    X(avx512dq, 7)                                                                                                     \
    X(avx512vl, 8)                                                                                                     \
    X(avx512vnni, 9)                                                                                                   \
    X(avx512bf16, 10)                                                                                                  \
    X(amxtile, 11)                                                                                                     \
    X(amxint8, 12)                                                                                                     \
    X(amxbf16, 13)                                                                                                     \
    X(neon, 20)                                                                                                        \
    X(neondot, 21)                                                                                                     \
    X(neonbf16, 22)                                                                                                    \
    X(sme, 23)                                                                                                         \
    X(v128, 30)                                                                                                        \
    X(v128relaxed, 31)                                                                                                 \
    X(sm80, 40)                                                                                                        \
    X(sm90, 41)

#define NK_CAPABILITY_ENUMERATOR_(name, bit) nk_cap_##name##_k = bit,
enum { NK_CAPABILITIES(NK_CAPABILITY_ENUMERATOR_) nk_capability_bits_k = 64 };
#undef NK_CAPABILITY_ENUMERATOR_

#define NK_CAP(name) ((nk_capability_t)1 << nk_cap_##name##_k)

/* What this processor has and this operating system saves; found once, then remembered. */
NK_PUBLIC nk_capability_t nk_cpu_capabilities_detected(void);
/* The union of what the rows in this build require. */
NK_PUBLIC nk_capability_t nk_cpu_capabilities_compiled(void);
/* Detected and compiled, less what NUMKONG_CAPABILITIES in the environment takes away. Only serial when it is
 * malformed. */
NK_PUBLIC nk_capability_t nk_cpu_capabilities_enabled(void);

/* Apply the text of NUMKONG_CAPABILITIES to a mask. A comma-separated list of capability or row names keeps only those
 * ("haswell", "avx2,fma"); capability names with a leading minus are taken away ("-avx512vnni"); serial always stays.
 * An empty or null text changes nothing, an unknown name is nk_bad_capability_name_k and *result is not written. */
NK_PUBLIC nk_status_t nk_capabilities_parse(char const *text, nk_capability_t base, nk_capability_t *result);

/* Why the machine lacks a capability, as a sentence without a full stop ("the operating system does not save AMX
 * tiles"); null when it has it. */
NK_PUBLIC char const *nk_capability_reason(nk_capability_t capability);
NK_PUBLIC char const *nk_capability_name(nk_capability_t capability);

#ifdef __cplusplus
}
#endif
#endif
