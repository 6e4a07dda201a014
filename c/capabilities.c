/* capabilities.c: what this processor has and this operating system saves, found once; the enabled mask; the reasons.
 */
#define _GNU_SOURCE /* syscall() */
#include <numkong/backend.h>

#include <stdlib.h>
#include <string.h>

#if NK_BUILD_X86
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if NK_BUILD_ARM64
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#endif
#endif

/* Why a capability is missing. Detection returns three masks: has, what the operating system withholds, and denied. */
typedef struct nk_detection_t {
    nk_capability_t has;
    nk_capability_t unsaved; /* the processor has it, the operating system does not save its registers */
    nk_capability_t denied;  /* the operating system refused the permission that it needs */
} nk_detection_t;

#if NK_BUILD_X86

static void nk_cpuid_(nk_u32_t leaf, nk_u32_t subleaf, nk_u32_t registers[4]) {
#if defined(_MSC_VER)
    int values[4];
    __cpuidex(values, (int)leaf, (int)subleaf);
    for (int index = 0; index != 4; ++index) registers[index] = (nk_u32_t)values[index];
#else
    __cpuid_count(leaf, subleaf, registers[0], registers[1], registers[2], registers[3]);
#endif
}

static nk_u64_t nk_saved_state_(void) { /* XCR0: the register files that the operating system saves */
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    nk_u32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (nk_u64_t)high << 32 | low;
#endif
}

static int nk_amx_permitted_(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { arch_req_xcomp_perm_k = 0x1023, tile_data_k = 18 };
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm_k, tile_data_k) == 0;
#else
    return 0;
#endif
}

enum { eax_k, ebx_k, ecx_k, edx_k };

static nk_detection_t nk_detect_(void) {
    nk_detection_t found = {NK_CAP(serial), 0, 0};
    nk_u32_t leaf0[4], leaf1[4], leaf7[4] = {0}, leaf7_1[4] = {0};
    nk_cpuid_(0, 0, leaf0);
    nk_cpuid_(1, 0, leaf1);
    if (leaf0[eax_k] >= 7) nk_cpuid_(7, 0, leaf7);
    if (leaf0[eax_k] >= 7 && leaf7[eax_k] >= 1) nk_cpuid_(7, 1, leaf7_1);

    /* Name, where CPUID tells of it, and which bits of XCR0 its registers need. */
    enum { avx_state_k = 0x6, avx512_state_k = 0xe6, tile_state_k = 0x60000 };
    struct {
        nk_capability_t capability;
        nk_u32_t present;
        nk_u64_t state;
    } const features[] = {
        {NK_CAP(avx2), leaf7[ebx_k] >> 5 & 1, avx_state_k},
        {NK_CAP(fma), leaf1[ecx_k] >> 12 & 1, avx_state_k},
        {NK_CAP(f16c), leaf1[ecx_k] >> 29 & 1, avx_state_k},
        {NK_CAP(avxvnni), leaf7_1[eax_k] >> 4 & 1, avx_state_k},
        {NK_CAP(avx512f), leaf7[ebx_k] >> 16 & 1, avx512_state_k},
        {NK_CAP(avx512bw), leaf7[ebx_k] >> 30 & 1, avx512_state_k},
        {NK_CAP(avx512dq), leaf7[ebx_k] >> 17 & 1, avx512_state_k},
        {NK_CAP(avx512vl), leaf7[ebx_k] >> 31 & 1, avx512_state_k},
        {NK_CAP(avx512vnni), leaf7[ecx_k] >> 11 & 1, avx512_state_k},
        {NK_CAP(avx512bf16), leaf7_1[eax_k] >> 5 & 1, avx512_state_k},
        {NK_CAP(amxtile), leaf7[edx_k] >> 24 & 1, tile_state_k},
        {NK_CAP(amxint8), leaf7[edx_k] >> 25 & 1, tile_state_k},
        {NK_CAP(amxbf16), leaf7[edx_k] >> 22 & 1, tile_state_k},
    };
    nk_u64_t const saved = leaf1[ecx_k] >> 27 & 1 ? nk_saved_state_() : 0; /* OSXSAVE */
    for (nk_size_t index = 0; index != sizeof(features) / sizeof(features[0]); ++index) {
        if (!features[index].present) continue;
        if ((saved & features[index].state) == features[index].state)
            found.has |= features[index].capability;
        else
            found.unsaved |= features[index].capability;
    }
    nk_capability_t const amx = found.has & (NK_CAP(amxtile) | NK_CAP(amxint8) | NK_CAP(amxbf16));
    if (amx && !nk_amx_permitted_()) found.has &= ~amx, found.denied |= amx;
    return found;
}

#elif NK_BUILD_WASM

/* A module whose instructions the engine does not know is not loaded at all, so what is compiled is there: hosts try a
 * module of a few bytes first and take the build without vectors where it is refused (docs/webassembly.md). */
static nk_detection_t nk_detect_(void) {
    nk_detection_t found = {NK_CAP(serial), 0, 0};
    if (NK_COMPILE_v128relaxed) found.has |= NK_CAP(v128) | NK_CAP(v128relaxed);
    return found;
}

#elif NK_BUILD_ARM64

/* One question to the operating system, which only tells of what it also saves. */
#if defined(__linux__)
static int nk_reports_(unsigned long type, nk_u64_t bits) { return (getauxval(type) & bits) == bits; }
#elif defined(__APPLE__)
static int nk_reports_(char const *name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value == 1;
}
#endif

static nk_detection_t nk_detect_(void) {
    nk_detection_t found = {NK_CAP(serial) | NK_CAP(neon), 0, 0}; /* NEON is part of AArch64 */
#if defined(__linux__)
    /* SME with its outer products from int8, bfloat16 and f32, which the architecture always has with it. */
    enum { has_dot_k = 1 << 20, has_bf16_k = 1 << 14 };
    nk_u64_t const has_sme = (nk_u64_t)1 << 23 | (nk_u64_t)1 << 26 | (nk_u64_t)1 << 28 | (nk_u64_t)1 << 29;
    if (nk_reports_(AT_HWCAP, has_dot_k)) found.has |= NK_CAP(neondot);
    if (nk_reports_(AT_HWCAP2, has_bf16_k)) found.has |= NK_CAP(neonbf16);
    if (nk_reports_(AT_HWCAP2, has_sme)) found.has |= NK_CAP(sme);
#elif defined(__APPLE__)
    if (nk_reports_("hw.optional.arm.FEAT_DotProd")) found.has |= NK_CAP(neondot);
    if (nk_reports_("hw.optional.arm.FEAT_BF16")) found.has |= NK_CAP(neonbf16);
    if (nk_reports_("hw.optional.arm.FEAT_SME") && nk_reports_("hw.optional.arm.SME_I8I32") &&
        nk_reports_("hw.optional.arm.SME_B16F32") && nk_reports_("hw.optional.arm.SME_F32F32"))
        found.has |= NK_CAP(sme);
#elif defined(_WIN32)
    enum { has_dot_k = 43 }; /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older SDKs do not name */
    if (IsProcessorFeaturePresent(has_dot_k)) found.has |= NK_CAP(neondot);
#endif
    return found;
}

#else

static nk_detection_t nk_detect_(void) {
    nk_detection_t const found = {NK_CAP(serial), 0, 0};
    return found;
}

#endif

/* Found on the first call: CPUID traps in virtual machines and costs microseconds there. Threads that race write the
 * same values; `ready` is written last and only ever goes from 0 to 1. */
static nk_detection_t nk_detection_(void) {
    static nk_detection_t found;
    static volatile int ready;
    if (!ready) {
        nk_detection_t const fresh = nk_detect_();
        found = fresh;
#if defined(__GNUC__)
        __sync_synchronize();
#endif
        ready = 1;
    }
    return found;
}

nk_capability_t nk_cpu_capabilities_detected(void) {
#if defined(NK_EMULATED_CAPABILITIES) /* a build against software models of instructions, tests/emulation */
    return nk_detection_().has | (NK_EMULATED_CAPABILITIES);
#else
    return nk_detection_().has;
#endif
}

nk_capability_t nk_cpu_capabilities_compiled(void) {
    nk_capability_t compiled = 0;
    for (nk_size_t index = 0; index != nk_backend_count(); ++index)
        if (nk_backend_at(index)->kernels) compiled |= nk_backend_at(index)->required;
    return compiled;
}

nk_capability_t nk_cpu_capabilities_enabled(void) {
    nk_capability_t const both = nk_cpu_capabilities_detected() & nk_cpu_capabilities_compiled();
    nk_capability_t enabled = 0;
    nk_status_t const status = nk_capabilities_parse(getenv("NUMKONG_CAPABILITIES"), both, &enabled);
    return status == nk_success_k ? enabled : NK_CAP(serial);
}

static int nk_same_name_(char const *name, char const *word, nk_size_t length) {
    return strlen(name) == length && memcmp(name, word, length) == 0;
}

static nk_capability_t nk_capability_mask_(char const *word, nk_size_t length) {
#define NK_MATCH_(name, bit)                                                                                           \
    if (nk_same_name_(#name, word, length)) return NK_CAP(name);
    NK_CAPABILITIES(NK_MATCH_)
#undef NK_MATCH_
    return 0;
}

static nk_capability_t nk_row_mask_(char const *word, nk_size_t length) {
    for (nk_size_t index = 0; index != nk_backend_count(); ++index)
        if (nk_same_name_(nk_backend_at(index)->name, word, length)) return nk_backend_at(index)->required;
    return 0;
}

nk_status_t nk_capabilities_parse(char const *text, nk_capability_t base, nk_capability_t *result) {
    nk_capability_t kept = 0, removed = 0;
    int keeps = 0;
    if (!result) return nk_null_argument_k;
    for (char const *word = text; word && *word;) {
        nk_size_t const length = strcspn(word, ",");
        int const minus = word[0] == '-';
        /* rows share most of their bits, so only a capability can be taken away */
        nk_capability_t mask = minus ? 0 : nk_row_mask_(word, length);
        if (!mask) mask = nk_capability_mask_(word + minus, length - (nk_size_t)minus);
        if (length && !mask) return nk_bad_capability_name_k;
        if (minus)
            removed |= mask;
        else if (length)
            kept |= mask, keeps = 1;
        word += length;
        word += *word == ',';
    }
    *result = ((keeps ? base & kept : base) & ~removed) | (base & NK_CAP(serial));
    return nk_success_k;
}

char const *nk_capability_name(nk_capability_t capability) {
    switch (capability) {
#define NK_NAME_(name, bit)                                                                                            \
    case NK_CAP(name): return #name;
        NK_CAPABILITIES(NK_NAME_)
#undef NK_NAME_
    default: return NULL;
    }
}

char const *nk_capability_reason(nk_capability_t capability) {
    nk_detection_t const found = nk_detection_();
    if (nk_cpu_capabilities_detected() & capability) return NULL;
    int const unsaved = (found.unsaved & capability) != 0, denied = (found.denied & capability) != 0;
    switch (capability) {
#define NK_REASON_(name, bit)                                                                                          \
    case NK_CAP(name):                                                                                                 \
        if (unsaved) return "the operating system does not save the registers of " #name;                              \
        if (denied) return "the operating system refuses permission to use " #name;                                    \
        return "the processor does not have " #name;
        NK_CAPABILITIES(NK_REASON_)
#undef NK_REASON_
    default: return "unknown capability";
    }
}
