/* ceilings.c: the fastest that one core can multiply and read, as loops without anything else in them. ceilings.py
 * compiles this file when the bench starts and times the loops between the contenders, because machines drift.
 *
 * Arithmetic: every accumulator in its own register (or tile), operands loaded once, so only the unit limits. Assembly,
 * so that no compiler spills an accumulator or sees that the result is not used. Operands are random numbers: some
 * units are faster on zeros. Reading: a buffer larger than the caches, summed. */
#include <stddef.h>
#include <stdint.h>

#define OPERAND_BYTES 2048 /* two tiles of 1 KB, or registers' worth of it */

#if defined(__x86_64__)
#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define CLOBBER_16                                                                                                     \
    "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",  \
        "xmm12", "xmm13", "xmm14", "xmm15"
#define ZERO(i) "vpxor %%xmm" #i ", %%xmm" #i ", %%xmm" #i "\n"

/* Twelve independent accumulators a round: more than latency times throughput of any of these units. */
#define LOOP(name, load, step)                                                                                         \
    static void name(void const *operands, int64_t rounds) {                                                           \
        __asm__ volatile(TWELVE(ZERO) load ".p2align 5\n1:\n" TWELVE(step) "dec %[rounds]\njnz 1b\nvzeroupper\n"       \
                         : [rounds] "+r"(rounds)                                                                       \
                         : [operands] "r"(operands)                                                                    \
                         : CLOBBER_16);                                                                                \
    }
#define LOAD_512 "vmovdqu64 (%[operands]), %%zmm12\nvmovdqu64 64(%[operands]), %%zmm13\n"
#define LOAD_256 "vmovdqu (%[operands]), %%ymm12\nvmovdqu 32(%[operands]), %%ymm13\n"
#define FMA_512(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" #i "\n"
#define FMA_256(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n"
#define BF16_512(i) "vdpbf16ps %%zmm12, %%zmm13, %%zmm" #i "\n"
#define INT8_512(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n"
#define INT8_256(i) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" #i "\n"
LOOP(f32_fma_512, LOAD_512, FMA_512)
LOOP(f32_fma_256, LOAD_256, FMA_256)
LOOP(bf16_dot_512, LOAD_512, BF16_512)
LOOP(int8_dot_512, LOAD_512, INT8_512)
LOOP(int8_dot_256, LOAD_256, INT8_256)

/* AVX2 has no int8 dot product: pairs to 16 bits, pairs to 32 bits, sum. */
#define ONES "vpcmpeqw %%ymm15, %%ymm15, %%ymm15\nvpsrlw $15, %%ymm15, %%ymm15\n"
#define MADDUBS_256(i)                                                                                                 \
    "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\nvpmaddwd %%ymm15, %%ymm14, %%ymm14\nvpaddd %%ymm14, %%ymm" #i ", %%ymm" #i  \
    "\n"
LOOP(int8_maddubs_256, LOAD_256 ONES, MADDUBS_256)

/* 2 x 2 tiles of sums; a tile is 16 rows of 64 bytes. */
#define AMX(name, multiply)                                                                                            \
    static void name(void const *operands, int64_t rounds) {                                                           \
        static uint8_t const config[64] = {1,         0,         [16] = 64, [18] = 64, [20] = 64, [22] = 64,           \
                                           [24] = 64, [26] = 64, [28] = 64, [30] = 64, [48] = 16, [49] = 16,           \
                                           [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};          \
        __asm__ volatile("ldtilecfg (%[config])\n"                                                                     \
                         "tilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3\n"                        \
                         "tileloadd (%[operands],%[stride],1), %%tmm4\n"                                               \
                         "tileloadd 1024(%[operands],%[stride],1), %%tmm5\n"                                           \
                         "tileloadd (%[operands],%[stride],1), %%tmm6\n"                                               \
                         "tileloadd 1024(%[operands],%[stride],1), %%tmm7\n"                                           \
                         ".p2align 5\n1:\n" multiply " %%tmm6, %%tmm4, %%tmm0\n" multiply                              \
                         " %%tmm7, %%tmm4, %%tmm1\n" multiply " %%tmm6, %%tmm5, %%tmm2\n" multiply                     \
                         " %%tmm7, %%tmm5, %%tmm3\n"                                                                   \
                         "dec %[rounds]\njnz 1b\ntilerelease\n"                                                        \
                         : [rounds] "+r"(rounds)                                                                       \
                         : [operands] "r"(operands), [config] "r"(config), [stride] "r"((int64_t)64)                   \
                         : "cc", "memory");                                                                            \
    }
AMX(amx_int8, "tdpbssd")
AMX(amx_bf16, "tdpbf16ps")
#endif

typedef uint64_t words_t __attribute__((vector_size(16)));
static volatile uint64_t sink;

/* Rounds are 64-byte lines of a 64-byte aligned buffer. */
static void memory_read(void const *buffer, int64_t rounds) {
    words_t const *words = (words_t const *)buffer;
    words_t a = {0}, b = {0}, c = {0}, d = {0};
    for (int64_t round = 0; round != rounds; ++round, words += 4)
        a += words[0], b += words[1], c += words[2], d += words[3];
    words_t const sum = a + b + c + d;
    sink = sum[0] + sum[1];
}

/* Operations (a multiplication and an addition are two) or bytes of a round. */
typedef struct {
    char const *name;
    void (*loop)(void const *operands, int64_t rounds);
    int64_t per_round;
} ceiling_t;

static ceiling_t const ceilings[] = {
#if defined(__x86_64__)
    {"f32_fma_512", f32_fma_512, 12 * 16 * 2},
    {"f32_fma_256", f32_fma_256, 12 * 8 * 2},
    {"bf16_dot_512", bf16_dot_512, 12 * 32 * 2},
    {"int8_dot_512", int8_dot_512, 12 * 64 * 2},
    {"int8_dot_256", int8_dot_256, 12 * 32 * 2},
    {"int8_maddubs_256", int8_maddubs_256, 12 * 32 * 2},
    {"amx_int8", amx_int8, 4 * 16 * 16 * 64 * 2},
    {"amx_bf16", amx_bf16, 4 * 16 * 16 * 32 * 2},
#endif
    {"memory_read", memory_read, 64},
};

int ceiling_count(void) { return (int)(sizeof(ceilings) / sizeof(ceilings[0])); }
char const *ceiling_name(int index) { return ceilings[index].name; }
int64_t ceiling_per_round(int index) { return ceilings[index].per_round; }
int ceiling_operand_bytes(void) { return OPERAND_BYTES; }
void ceiling_run(int index, void const *operands, int64_t rounds) { ceilings[index].loop(operands, rounds); }
