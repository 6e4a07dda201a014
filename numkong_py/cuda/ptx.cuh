// Shared device helpers: types, the fixed sum tree, barriers, bulk copies and matrix instructions. Nothing here knows MaxSim's schedule.
// No printf, no trap and one wgmma shape a kernel: each of those makes ptxas serialise wgmma (C7510, C7518, C7511), right but slow.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
constexpr u32 FULL_WARP = 0xffffffffu;
constexpr u32 NEGATIVE_INFINITY_BITS = 0xff800000u;
constexpr u32 NAN_BITS = 0x7fffffffu;
constexpr i64 SPIN_LIMIT = 4000000000LL;  // clocks, about 2 s: a wait that lasts longer sets the error word and the kernel leaves

DEVICE float negative_infinity() { return __uint_as_float(NEGATIVE_INFINITY_BITS); }

// ---------------------------------------------------------------- max, NaN wins
DEVICE float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// The contract's order: a NaN beats every number, equal values (two NaN are equal) go to the lower index.
template <typename T> DEVICE bool wins(T value, int index, T best, int best_index) {
    const bool value_nan = value != value, best_nan = best != best;
    if (value_nan != best_nan) return value_nan;
    if (!value_nan && value != best) return value > best;
    return index < best_index;
}

// ---------------------------------------------------------------- the fixed sum tree
// 16 rows: r + (r + 8), then neighbours at distance 1, 2, 4; the groups of a query then follow one another in ascending order.
// lane_of_row: how far apart (in lanes) rows r and r + 1 of one group sit. `low` is row r, `high` row r + 8.
template <int LANE_OF_ROW> DEVICE double sum_of_16_rows(double low, double high) {
    double s = low + high;
    s += __shfl_xor_sync(FULL_WARP, s, LANE_OF_ROW);
    s += __shfl_xor_sync(FULL_WARP, s, 2 * LANE_OF_ROW);
    s += __shfl_xor_sync(FULL_WARP, s, 4 * LANE_OF_ROW);
    return s;
}
// Precedence: an empty query scores 0, then an empty document its empty value, then the sum (or mean).
DEVICE double score_of(double sum, int query_count, i64 document_count, int mean, double empty) {
    if (query_count == 0) return 0.0;
    if (document_count <= 0) return empty;
    return mean ? sum / query_count : sum;
}

// ---------------------------------------------------------------- the f32 screen
// |C - v| for v a dot of two f16 planes on the matrix unit and C the f64 dot of the f32 tokens; a set is {largest norm, largest |x - plane|}.
// Residuals by Cauchy-Schwarz, 36 ceil(depth / 16) 2^-24 for the matrix unit, (depth + 1) 2^-53 for C, the rest for f32 arithmetic here.
DEVICE float screen_bound(float4 query, float4 document, int depth) {
    const float planes = (query.x + query.y) * (document.x + document.y);
    const float unit = 36.0f * ((depth + 15) / 16) * 0x1p-24f + (depth + 1) * 0x1p-53f;
    return (query.y * document.x + (query.x + query.y) * document.y + unit * planes) * (1.0f + 0x1p-16f) + depth * 0x1p-126f;
}

// ---------------------------------------------------------------- shared-memory barriers
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
DEVICE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE bool barrier_try(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}
// Bounded: false after SPIN_LIMIT clocks.
DEVICE bool barrier_wait(u32 barrier, u32 parity) {
    if (barrier_try(barrier, parity)) return true;
    const i64 start = clock64();
    while (!barrier_try(barrier, parity))
        if (clock64() - start > SPIN_LIMIT) return false;
    return true;
}

#if __CUDA_ARCH__ >= 900
// ---------------------------------------------------------------- bulk tensor copies (TMA)
struct alignas(64) TensorMap { u64 opaque[16]; };

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE void load_box(u32 destination, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(destination), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// ---------------------------------------------------------------- wgmma
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
template <int REGISTERS> DEVICE void registers_shrink() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> DEVICE void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// K-major operand in 128-byte swizzle: address / 16, leading offset unused, 1024 bytes between groups of 8 rows.
DEVICE u64 operand_descriptor(u32 address) { return (u64)((address & 0x3FFFFu) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }

#define ACCUMULATOR4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define ACCUMULATOR16(a, i) ACCUMULATOR4(a, i), ACCUMULATOR4(a, i + 4), ACCUMULATOR4(a, i + 8), ACCUMULATOR4(a, i + 12)
#define WGMMA_64X64(TYPE)                                                                                                  \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                                           \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
                 "%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n\t}"                                              \
                 : ACCUMULATOR16(d, 0), ACCUMULATOR16(d, 16)                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "n"(ACCUMULATE))
// d (64 x 64, f32) = or += a (64 x 16, registers) b^T (64 x 16, shared memory)
template <bool IS_BF16, int ACCUMULATE> DEVICE void wgmma_64x64(float (&d)[32], const u32 (&a)[4], u64 descriptor) {
    if constexpr (IS_BF16) WGMMA_64X64("bf16"); else WGMMA_64X64("f16");
}
#define WGMMA_64X128(TYPE)                                                                                                 \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                                          \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
                 "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,"    \
                 "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, 0;\n\t}"                            \
                 : ACCUMULATOR16(d, 0), ACCUMULATOR16(d, 16), ACCUMULATOR16(d, 32), ACCUMULATOR16(d, 48)                   \
                 : "l"(a), "l"(b), "r"(accumulate))
// d (64 x 128, f32) = or += a (64 x 16) b^T (128 x 16), both in shared memory
template <bool IS_BF16> DEVICE void wgmma_64x128(float (&d)[64], u64 a, u64 b, int accumulate) {
    if constexpr (IS_BF16) WGMMA_64X128("bf16"); else WGMMA_64X128("f16");
}
// Keeps reads and writes of accumulators on their side of a wgmma fence or wait.
template <int COUNT> DEVICE void pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
#endif

// ---------------------------------------------------------------- mma.sync (sm_80 and everything newer)
template <bool IS_BF16> DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// 16 bytes from device to shared memory; bytes beyond `valid` (0 or 16) are written as zeros.
DEVICE void copy_16_bytes(u32 destination, const void* source, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
