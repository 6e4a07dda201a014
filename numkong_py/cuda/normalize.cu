// Divides tokens by their norms, in place: the quotient in f64, rounded once to the tokens' type; zero and non-finite tokens stay.
//
// Half a warp a token in the contract's 16-lane order, so that norms and stored bits are those of the CPU rows.
// Compiled once per DTYPE (0 bf16, 1 f16, 2 f32), a macro.
#include "ptx.cuh"

constexpr int THREADS = 128;

struct Params {
    void* tokens;  // [count, stride]
    i64 count;
    int depth, stride;
};

#if DTYPE == 2
typedef float Element;
DEVICE double widen(Element x) { return x; }
DEVICE Element narrow(double x) { return __double2float_rn(x); }
#elif DTYPE == 1
typedef u16 Element;
DEVICE double widen(Element x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}
DEVICE Element narrow(double x) {
    u16 r;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r) : "d"(x));
    return r;
}
#else
typedef u16 Element;
DEVICE double widen(Element x) { return __uint_as_float((u32)x << 16); }
DEVICE Element narrow(double x) {  // to f32 by rounding to odd, so that the second rounding is as if it were the only one
    const float down = __double2float_rz(x);
    const u32 bits = __float_as_uint(down) | ((double)down != x);
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) normalize(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 15;
    const u32 mask = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    const i64 step = (i64)gridDim.x * (THREADS / 16);
    for (i64 token = (i64)blockIdx.x * (THREADS / 16) + (threadIdx.x >> 4); token < p.count; token += step) {
        Element* row = static_cast<Element*>(p.tokens) + token * p.stride;
        double square = 0.0;
        for (int k = lane; k < p.depth; k += 16) square = fma(widen(row[k]), widen(row[k]), square);
#pragma unroll
        for (int fold = 8; fold >= 1; fold >>= 1) square += __shfl_xor_sync(mask, square, fold);
        if (square == 0.0 || square - square != 0.0) continue;
        const double norm = sqrt(square);
        for (int k = lane; k < p.depth; k += 16) row[k] = narrow(widen(row[k]) / norm);
    }
}
