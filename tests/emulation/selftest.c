/* Checks the models against plain C, one line per check, exit status 1 if one fails.
 *
 * Built with -include x86_model.h it checks the models; built with -DNK_SELFTEST_HARDWARE and the real instruction sets
 * (build.py --hardware) it checks the plain C against the processor, which is what makes the plain C worth trusting.
 */
#include <immintrin.h>

#include <float.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef NK_SELFTEST_HARDWARE
#include <sys/syscall.h>
#pragma GCC target(                                                                                                    \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avxvnni,amx-tile,amx-int8,amx-bf16")
#elif NK_MODEL_AVX512
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#endif

enum { rounds_k = 2000 };

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static uint32_t random_u32(void) { // xorshift64*: the same cases on every machine
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545F4914F6CDD1Du) >> 32);
}

static void random_bytes(void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) ((uint8_t *)bytes)[i] = (uint8_t)random_u32();
}

/* Bytes in which every other one is an extreme of u8 or i8: where saturating relatives of the instruction would differ.
 */
static void random_extreme_bytes(uint8_t *bytes, size_t count) {
    static uint8_t const extremes[] = {0, 1, 127, 128, 129, 255};
    for (size_t i = 0; i < count; i++) bytes[i] = random_u32() & 1 ? extremes[random_u32() % 6] : (uint8_t)random_u32();
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* bfloat16 bits of magnitude 2^(-range) .. 2^range; or, where flushing is the question, about 2^-64 (so that products
 * are about the smallest normal number), one in eight subnormal. */
static uint16_t random_bf16(int range, int near_subnormal) {
    uint32_t const bits = random_u32();
    uint32_t const ordinary = 127 - (uint32_t)range + (bits >> 16) % (2 * (uint32_t)range);
    uint32_t const small = bits >> 16 & 7 ? 48 + (bits >> 19 & 31) : 0;
    return (uint16_t)((bits & 0x807F) | (near_subnormal ? small : ordinary) << 7);
}

static float float_of_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

static float flush(float value) { return fabsf(value) < FLT_MIN ? copysignf(0.0f, value) : value; }

/* left * right + sum, rounded once to nearest even as if the exponent had no lower end, then flushed: what "denormals
 * are zero, flush to zero" mean. Computed 2^96 higher where the range allows, so that nothing is subnormal on the way.
 */
static float flushing_fma(float left, float right, float sum) {
    left = flush(left), right = flush(right), sum = flush(sum);
    if (fabs((double)left * (double)right) > 1.0 || fabsf(sum) > 1.0f) return flush(fmaf(left, right, sum));
    float const lift = 0x1p48f;
    float const lifted = fmaf(left * lift, right * lift, sum * lift * lift);
    return fabsf(lifted) < FLT_MIN * lift * lift ? copysignf(0.0f, lifted) : lifted / lift / lift;
}

static float dot_pair(float sum, uint16_t const *left, uint16_t const *right) {
    sum = flushing_fma(float_of_bf16(left[1]), float_of_bf16(right[1]), sum);
    return flushing_fma(float_of_bf16(left[0]), float_of_bf16(right[0]), sum);
}

static int32_t dot_bytes(int32_t sum, uint8_t const *left, int left_signed, uint8_t const *right, int right_signed) {
    uint32_t wrapped = (uint32_t)sum;
    for (int i = 0; i < 4; i++)
        wrapped += (uint32_t)((left_signed ? (int)(int8_t)left[i] : (int)left[i]) *
                              (right_signed ? (int)(int8_t)right[i] : (int)right[i]));
    return (int32_t)wrapped;
}

static int check_dpbusd(void) {
    for (int round = 0; round < rounds_k; round++) {
        uint8_t left[64], right[64];
        int32_t sums[16], by_256[16], by_512[16];
        random_extreme_bytes(left, sizeof left);
        random_extreme_bytes(right, sizeof right);
        random_bytes(sums, sizeof sums);
        for (int half = 0; half < 2; half++)
            _mm256_storeu_si256((__m256i *)(by_256 + 8 * half),
                                _mm256_dpbusd_avx_epi32(_mm256_loadu_si256((__m256i const *)(sums + 8 * half)),
                                                        _mm256_loadu_si256((__m256i const *)(left + 32 * half)),
                                                        _mm256_loadu_si256((__m256i const *)(right + 32 * half))));
        _mm512_storeu_si512(
            by_512, _mm512_dpbusd_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(left), _mm512_loadu_si512(right)));
        for (int lane = 0; lane < 16; lane++) {
            int32_t const expected = dot_bytes(sums[lane], left + 4 * lane, 0, right + 4 * lane, 1);
            if (by_256[lane] != expected || by_512[lane] != expected) return 0;
        }
    }
    return 1;
}

static int check_dpbf16(int near_subnormal) {
    for (int round = 0; round < rounds_k; round++) {
        uint16_t left[32], right[32];
        float sums[16], found[16];
        for (int i = 0; i < 32; i++)
            left[i] = random_bf16(20, near_subnormal), right[i] = random_bf16(20, near_subnormal);
        for (int i = 0; i < 16; i++)
            sums[i] =
                near_subnormal ? float_of(random_u32() & 0x81FFFFFFu) : float_of_bf16(random_bf16(40, 0)) * 1.234567f;
        _mm512_storeu_ps(found, _mm512_dpbf16_ps(_mm512_loadu_ps(sums), (__m512bh)_mm512_loadu_si512(left),
                                                 (__m512bh)_mm512_loadu_si512(right)));
        for (int lane = 0; lane < 16; lane++)
            if (bits_of(found[lane]) != bits_of(dot_pair(sums[lane], left + 2 * lane, right + 2 * lane))) return 0;
    }
    return 1;
}
static int check_dpbf16_ordinary(void) { return check_dpbf16(0); }
static int check_dpbf16_flushing(void) { return check_dpbf16(1); }

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config_t;

/* Tile 0 holds the sums, tile 1 the left operand, tile 2 the right one; groups of 4 bytes are the common dimension. */
static tile_config_t product_config(unsigned rows, unsigned columns, unsigned groups) {
    tile_config_t config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    config.rows[0] = (uint8_t)rows, config.row_bytes[0] = (uint16_t)(4 * columns);
    config.rows[1] = (uint8_t)rows, config.row_bytes[1] = (uint16_t)(4 * groups);
    config.rows[2] = (uint8_t)groups, config.row_bytes[2] = (uint16_t)(4 * columns);
    return config;
}

/* The compiler's tile intrinsics do not say what memory they read (gcc 12), so stores before them are pinned down here.
 */
static void settle_memory(void) { __asm__ volatile("" ::: "memory"); }

static int check_tile_bytes(void) {
    for (int round = 0; round < rounds_k / 20; round++) {
        unsigned const rows = 1 + random_u32() % 16, columns = 1 + random_u32() % 16, groups = 1 + random_u32() % 16;
        tile_config_t const config = product_config(rows, columns, groups);
        uint8_t left[16 * 80], right[16 * 96]; // strides of their own, so that a swapped stride shows
        int32_t sums[16 * 20], found[4][16 * 20];
        random_extreme_bytes(left, sizeof left);
        random_extreme_bytes(right, sizeof right);
        random_bytes(sums, sizeof sums);
        settle_memory();
        _tile_loadconfig(&config);
        _tile_loadd(1, left, 80);
        _tile_stream_loadd(2, right, 96);
        _tile_loadd(0, sums, 80);
        _tile_dpbuud(0, 1, 2);
        _tile_stored(0, found[0], 80);
        _tile_loadd(0, sums, 80);
        _tile_dpbusd(0, 1, 2);
        _tile_stored(0, found[1], 80);
        _tile_loadd(0, sums, 80);
        _tile_dpbsud(0, 1, 2);
        _tile_stored(0, found[2], 80);
        _tile_loadd(0, sums, 80);
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, found[3], 80);
        _tile_release();
        settle_memory();
        for (int kind = 0; kind < 4; kind++)
            for (unsigned row = 0; row < rows; row++)
                for (unsigned column = 0; column < columns; column++) {
                    int32_t expected = sums[20 * row + column];
                    for (unsigned group = 0; group < groups; group++)
                        expected = dot_bytes(expected, left + 80 * row + 4 * group, kind >> 1,
                                             right + 96 * group + 4 * column, kind & 1);
                    if (found[kind][20 * row + column] != expected) return 0;
                }
    }
    return 1;
}

/* The two chains, even and odd elements, that the manual describes, then their sum, then the old value. */
static float tile_dot_bf16(float sum, uint16_t const *left, uint16_t const *right, unsigned right_stride,
                           unsigned groups) {
    float even = 0.0f, odd = 0.0f;
    for (unsigned group = 0; group < groups; group++) {
        even = flushing_fma(float_of_bf16(left[2 * group]), float_of_bf16(right[right_stride * group]), even);
        odd = flushing_fma(float_of_bf16(left[2 * group + 1]), float_of_bf16(right[right_stride * group + 1]), odd);
    }
    return flushing_fma(flushing_fma(even, 1.0f, odd), 1.0f, sum);
}

static int check_tile_bf16(int near_subnormal) {
    for (int round = 0; round < rounds_k / 20; round++) {
        unsigned const rows = 1 + random_u32() % 16, columns = 1 + random_u32() % 16, groups = 1 + random_u32() % 16;
        tile_config_t const config = product_config(rows, columns, groups);
        uint16_t left[16 * 32], right[16 * 32];
        float sums[16 * 16], found[16 * 16];
        for (int i = 0; i < 16 * 32; i++)
            left[i] = random_bf16(20, near_subnormal), right[i] = random_bf16(20, near_subnormal);
        for (int i = 0; i < 16 * 16; i++)
            sums[i] = near_subnormal ? 0.0f : float_of_bf16(random_bf16(40, 0)) * 1.234567f;
        settle_memory();
        _tile_loadconfig(&config);
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, left, 64);
        _tile_loadd(2, right, 64);
        _tile_dpbf16ps(0, 1, 2);
        _tile_stored(0, found, 64);
        _tile_release();
        settle_memory();
        for (unsigned row = 0; row < rows; row++)
            for (unsigned column = 0; column < columns; column++)
                if (bits_of(found[16 * row + column]) !=
                    bits_of(tile_dot_bf16(sums[16 * row + column], left + 32 * row, right + 2 * column, 32, groups)))
                    return 0;
    }
    return 1;
}
static int check_tile_bf16_ordinary(void) { return check_tile_bf16(0); }
static int check_tile_bf16_flushing(void) { return check_tile_bf16(1); }

/* What _tile_zero leaves, and that a store writes no byte outside the tile's shape. */
static int check_tile_zero(void) {
    tile_config_t const config = product_config(3, 5, 2);
    uint8_t found[16 * 64];
    memset(found, 0xA5, sizeof found);
    settle_memory();
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_stored(0, found, 64);
    _tile_release();
    settle_memory();
    for (int i = 0; i < 16 * 64; i++)
        if (found[i] != (i / 64 < 3 && i % 64 < 20 ? 0 : 0xA5)) return 0;
    return 1;
}

static void break_palette(void) {
    tile_config_t config = product_config(16, 16, 16);
    config.palette = 2;
    settle_memory();
    _tile_loadconfig(&config);
}
static void break_configuration(void) {
    _tile_release();
    _tile_zero(0);
}
static void break_shapes(void) {
    tile_config_t config = product_config(16, 16, 16);
    config.rows[2] = 15;
    settle_memory();
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_dpbssd(0, 1, 2);
}

/* A broken rule must end the process by a signal: a fault on the hardware, abort() in the model. */
static int check_faults(void) {
    void (*const offences[])(void) = {break_palette, break_configuration, break_shapes};
    for (size_t i = 0; i < sizeof offences / sizeof *offences; i++) {
        fflush(NULL);
        pid_t const child = fork();
        if (child == 0) {
            fclose(stderr);
            offences[i]();
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (!WIFSIGNALED(status)) return 0;
    }
    return 1;
}

static struct {
    char const *name;
    int (*holds)(void);
} const checks[] = {
    {"vpdpbusd", check_dpbusd},
    {"vdpbf16ps", check_dpbf16_ordinary},
    {"vdpbf16ps flushing", check_dpbf16_flushing},
    {"tdpbuud tdpbusd tdpbsud tdpbssd", check_tile_bytes},
    {"tdpbf16ps", check_tile_bf16_ordinary},
    {"tdpbf16ps flushing", check_tile_bf16_flushing},
    {"tilezero tilestored", check_tile_zero},
    {"tile faults", check_faults},
};

int main(void) {
#ifdef NK_SELFTEST_HARDWARE
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) != 0) {
        puts("no permission to use AMX");
        return 2;
    }
#endif
    int failures = 0;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        int const holds = checks[i].holds();
        printf("%s %s\n", holds ? "ok  " : "FAIL", checks[i].name);
        failures += !holds;
    }
    return failures != 0;
}
