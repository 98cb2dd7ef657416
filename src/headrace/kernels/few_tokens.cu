// y = x W^T (+ bias) in bf16 for a few tokens: a stream of weights from global memory into tensor-core fragments.
//
// Weights are the A operand (16 rows), tokens the B operand (8 columns) of mma.m16n8k16. The order of k inside a
// block of 32 columns is free as long as both operands agree, so with g = lane / 4 and t = lane % 4 the 16 bytes of
// row g at column 32 b + 8 t serve as they lie: words 0, 1 are a0, a2 of one step and words 2, 3 those of the next;
// row g + 8 gives a1, a3, and the same columns of token g give b0, b1. No shared memory, no shuffle, no repacking.
//
// A unit is 64 columns: two such blocks, whole 128-byte lines of the 16 rows. The units of a row are dealt in turn to
// KS warps of a CTA and to CK CTAs of a cluster, so that together they read long runs; the sums meet in shared
// memory, in a fixed order.
//
// RB blocks of 16 rows a warp, WR such groups a CTA, NB blocks of 8 tokens, PF units held in registers.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct alignas(16) Quad {
    u32 x, y, z, w;
};

constexpr int ROWS = 16 * RB * WR;   // of a CTA
constexpr int STRIDE = ROWS + 4;     // of a token's sums: the writes of a warp fall into different banks
constexpr int THREADS = 32 * KS * WR;
static_assert(KS * NB * 8 * STRIDE * 4 <= 48 * 1024, "the sums must fit into static shared memory");

#ifndef EMULATED  // the tests run this file on the CPU, with their own forms of the instructions below
#define DEVICE __device__ __forceinline__
#ifndef __cluster_dims__
#define __cluster_dims__(...) __attribute__((cluster_dims(__VA_ARGS__)))
#endif

// Zero unless wanted. One predicated instruction each, which a condition in C++ does not always become.
DEVICE Quad load_once(const void* p, bool wanted) {  // weights: read once, so never kept in L1
    Quad r;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
                 "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
                 "@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
                 : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(p), "r"((u32)wanted));
    return r;
}

DEVICE Quad load(const void* p, bool wanted) {
    Quad r;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
                 "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
                 "@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
                 : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(p), "r"((u32)wanted) : "memory");
    return r;
}

DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

DEVICE u16 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Where the launch allows it, this kernel starts while the one that makes x still runs: weights may be fetched, x not.
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE u32 cluster_rank() {
    u32 rank = 0;
    if (CK > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
}

DEVICE float load_from_rank(const float* mine, u32 rank) {  // the same shared variable of another CTA
    u64 address;
    u32 theirs;
    float value;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(mine));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"((u32)address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(theirs) : "memory");
    return value;
}
#endif

struct Weights {
    Quad low[RB][2], high[RB][2];  // rows g and g + 8, columns 0-31 and 32-63 of the unit
};

struct Tokens {
    Quad half[NB][2];
};

extern "C" __global__ void __launch_bounds__(THREADS)
#if CK > 1
    __cluster_dims__(CK, 1, 1)
#endif
few_tokens(const u16* __restrict__ x, const u16* __restrict__ weight, const u16* __restrict__ bias, void* y,
           int tokens, int rows, int units, int x_stride, int weight_stride) {
    __shared__ float sums[KS][NB * 8][STRIDE];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int split = warp % KS, group = warp / KS, rank = cluster_rank();
    const int row0 = blockIdx.x / CK * ROWS;
    const int first = rank * KS + split;
    const int count = units > first ? (units - first + KS * CK - 1) / (KS * CK) : 0;
    constexpr int STEP = KS * CK * 64;

    // Rows past the last are read as the last and never written.
    const u16 *low[RB], *high[RB], *token[NB];
#pragma unroll
    for (int r = 0; r < RB; r++) {
        const int row = row0 + (group * RB + r) * 16 + g;
        low[r] = weight + (u64)(row < rows ? row : rows - 1) * weight_stride + first * 64 + 8 * t;
        high[r] = weight + (u64)(row + 8 < rows ? row + 8 : rows - 1) * weight_stride + first * 64 + 8 * t;
    }
#pragma unroll
    for (int n = 0; n < NB; n++)
        token[n] = x + (u64)(n * 8 + g < tokens ? n * 8 + g : 0) * x_stride + first * 64 + 8 * t;

    Weights held[PF];
#pragma unroll
    for (int p = 0; p < PF; p++)
#pragma unroll
        for (int r = 0; r < RB; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                held[p].low[r][h] = load_once(low[r] + p * STEP + 32 * h, p < count);
                held[p].high[r][h] = load_once(high[r] + p * STEP + 32 * h, p < count);
            }
    let_next_start();
    wait_for_inputs();

    Tokens next;
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) next.half[n][h] = load(token[n] + 32 * h, 0 < count && n * 8 + g < tokens);

    float sum[RB][NB][4] = {};
#pragma unroll 1
    for (int left = count; left > 0; left -= PF) {
#pragma unroll
        for (int p = 0; p < PF; p++) {
            const Tokens b = next;
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    next.half[n][h] = load(token[n] + (p + 1) * STEP + 32 * h, p + 1 < left && n * 8 + g < tokens);
#pragma unroll
            for (int r = 0; r < RB; r++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const Quad l = held[p].low[r][h], u = held[p].high[r][h];
#pragma unroll
                    for (int n = 0; n < NB; n++) {
                        mma(sum[r][n], l.x, u.x, l.y, u.y, b.half[n][h].x, b.half[n][h].y);
                        mma(sum[r][n], l.z, u.z, l.w, u.w, b.half[n][h].z, b.half[n][h].w);
                    }
                    held[p].low[r][h] = load_once(low[r] + (p + PF) * STEP + 32 * h, p + PF < left);
                    held[p].high[r][h] = load_once(high[r] + (p + PF) * STEP + 32 * h, p + PF < left);
                }
            __syncwarp();  // or ptxas would move every load of the turn behind its last product
        }
#pragma unroll
        for (int r = 0; r < RB; r++) low[r] += PF * STEP, high[r] += PF * STEP;
#pragma unroll
        for (int n = 0; n < NB; n++) token[n] += PF * STEP;
    }

#pragma unroll
    for (int r = 0; r < RB; r++)
#pragma unroll
        for (int n = 0; n < NB; n++) {
            float* to = &sums[split][n * 8 + 2 * t][(group * RB + r) * 16 + g];
            to[0] = sum[r][n][0];
            to[STRIDE] = sum[r][n][1];
            to[8] = sum[r][n][2];
            to[STRIDE + 8] = sum[r][n][3];
        }
    __syncthreads();
    if (CK > 1) {  // every CTA leaves its own sum where the first warp's was
        for (int i = threadIdx.x; i < ROWS * tokens; i += THREADS) {
            const int n = i / ROWS, row = i % ROWS;
            float total = sums[0][n][row];
#pragma unroll
            for (int s = 1; s < KS; s++) total += sums[s][n][row];
            sums[0][n][row] = total;
        }
        cluster_sync();
    }
    for (int i = rank * THREADS + threadIdx.x; i < ROWS * tokens; i += THREADS * CK) {
        const int n = i / ROWS, row = i % ROWS;
        float total = CK > 1 ? load_from_rank(&sums[0][n][row], 0) : sums[0][n][row];
#pragma unroll
        for (int s = 1; s < (CK > 1 ? CK : KS); s++)
            total += CK > 1 ? load_from_rank(&sums[0][n][row], s) : sums[s][n][row];
        if (row0 + row < rows) {
            if (bias) total += from_bf16(bias[row0 + row]);
            const u64 at = (u64)n * rows + row0 + row;
            if (OUT32)
                ((float*)y)[at] = total;
            else
                ((u16*)y)[at] = to_bf16(total);
        }
    }
    if (CK > 1) cluster_sync();  // nobody leaves while its sums are read
}
