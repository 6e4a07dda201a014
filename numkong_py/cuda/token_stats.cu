// What bounds, cosine and screening need of every token, in one read: squared norms, and for f32 the f16 plane with what it leaves out.
//
// Half a warp a token in the contract's 16-lane order, so that the squared norm has the CPU's bits. One column of CTAs a set; maxima per
// set by atomicMax on the bits of non-negative floats (the order of arrival does not matter). All f32 outputs are rounded up.
// Compiled once per DTYPE (0 bf16, 1 f16, 2 f32), a macro.
#include "ptx.cuh"

#define PLANE_LIMIT 32768.0f      // above it (and for NaN, infinity) the plane holds zeros and the residual is infinite
constexpr double LOUD = 0x1p112;  // as in maxsim_sm80.cu

struct Params {
    const void* tokens;       // [tokens, stride]
    const i64* offsets;       // or null: `length` tokens a set
    double* squares;          // [tokens], or null
    u16* plane;               // [tokens, plane_stride], f32 only
    float* sets;              // [sets + 1, 4] zeros: largest norm, largest residual, 1 where a token is loud; last row: 1 if any is
    i64 set_count;
    int length, depth, stride, plane_stride;
};

DEVICE float element(const Params& p, i64 at) {
#if DTYPE == 2
    return static_cast<const float*>(p.tokens)[at];
#elif DTYPE == 1
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(static_cast<const u16*>(p.tokens)[at]));
    return r;
#else
    return __uint_as_float((u32)static_cast<const u16*>(p.tokens)[at] << 16);
#endif
}
DEVICE float root_up(double square) { return __double2float_ru(sqrt(square) * (1.0 + 0x1p-40)); }

extern "C" __global__ void __launch_bounds__(128) token_stats(const __grid_constant__ Params p) {
    const int half = threadIdx.x >> 4, lane = threadIdx.x & 15;
    const u32 mask = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    for (i64 set = blockIdx.x; set < p.set_count; set += gridDim.x) {
        const i64 start = p.offsets ? p.offsets[set] : set * p.length, end = p.offsets ? p.offsets[set + 1] : start + p.length;
        float norm = 0.0f, residual = 0.0f, loud = 0.0f;
        for (i64 token = start + blockIdx.y * 8 + half; token < end; token += 8 * gridDim.y) {
            double square = 0.0;
            float largest = 0.0f;
            for (int k = lane; k < p.depth; k += 16) {
                const float x = element(p, token * p.stride + k);
                square = fma((double)x, (double)x, square);
                if (!(fabsf(x) <= largest)) largest = fabsf(x);  // a NaN stays: the next comparison with it is false as well
            }
#pragma unroll
            for (int step = 8; step >= 1; step >>= 1) {
                square += __shfl_xor_sync(mask, square, step);
                const float other = __shfl_xor_sync(mask, largest, step);
                if (!(other <= largest)) largest = other;
            }
#if DTYPE == 2
            double rest = 0.0;
            const bool fits = largest <= PLANE_LIMIT;
            for (int k = lane; k < p.plane_stride; k += 16) {
                const float x = k < p.depth ? element(p, token * p.stride + k) : 0.0f;
                u16 bits = 0;
                float back = 0.0f;
                if (fits) {
                    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
                    asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(bits));
                }
                p.plane[token * p.plane_stride + k] = bits;
                const double r = (double)x - (double)back;
                rest = fma(r, r, rest);
            }
#pragma unroll
            for (int step = 8; step >= 1; step >>= 1) rest += __shfl_xor_sync(mask, rest, step);
            residual = fmaxf(residual, fits ? root_up(rest) : -negative_infinity());
#endif
            if (p.squares && lane == 0) p.squares[token] = square;
            const float up = root_up(square);
            norm = up == up ? fmaxf(norm, up) : -negative_infinity();
            if (!(square < LOUD)) loud = 1.0f;
        }
        if (lane != 0) continue;
        atomicMax(reinterpret_cast<int*>(p.sets + 4 * set), __float_as_int(norm));
        atomicMax(reinterpret_cast<int*>(p.sets + 4 * set + 1), __float_as_int(residual));
        if (loud != 0.0f) p.sets[4 * set + 2] = p.sets[4 * p.set_count] = loud;
    }
}
