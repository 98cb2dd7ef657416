// A few tokens times their INT4 experts: y[pair] = W[expert] x[row], or silu(gate) * up of two halves of W (GATED).
//
// Weights are the A operand of mma.m16n8k16 (16 rows), tokens are B (8 columns). Weights lie in fragment order
// (int4_experts.py: repack), so that they go from global memory to registers, 16 bytes a lane for 16 rows x 64 columns.
// The product runs on unscaled integers, exact in bf16: a stored nibble becomes 128 + n = 136 + q with one shift and
// one logic operation, less 136. A finished group of 32 columns is multiplied by its scale in float32.
//
// Work is a list of items: one block of tokens of one expert x one tile of rows. A CTA takes every gridDim.x-th item;
// while it finishes one, the weights of the next are already under way.
//
// GATED  1: rows are gate, then up; a CTA holds both halves of what it writes
// KS     warps that share the columns     WR  warps side by side over rows     RB  blocks of 16 rows a warp
// PF     steps of 64 columns kept in flight     NB  blocks of 8 tokens an item     MINB  CTAs a multiprocessor
// EVEN   1: every warp's steps are a multiple of PF
// ORDER  0: consecutive items are tiles of one block of tokens; 1: blocks of tokens at one tile

#ifndef GATED
#define GATED 0
#endif
#ifndef KS
#define KS 4
#endif
#ifndef WR
#define WR 2
#endif
#ifndef RB
#define RB 1
#endif
#ifndef PF
#define PF 4
#endif
#ifndef NB
#define NB 1
#endif
#ifndef EVEN
#define EVEN 0
#endif
#ifndef MINB
#define MINB 4
#endif
#ifndef ORDER
#define ORDER 0
#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int UNITS = WR * RB;                        // row blocks that a CTA multiplies
constexpr int TILE = GATED ? UNITS / 2 : UNITS;       // row blocks that it writes
constexpr int THREADS = 32 * KS * WR;
static_assert(!GATED || UNITS % 2 == 0, "gate and up go together");

#ifndef EMULATED  // a test runs this file on a CPU, with these instructions in C++

__device__ __forceinline__ uint4 load_weights(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load_scales(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 load_tokens(const u16* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ int load_index(const int* p) {
    int v;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Two bf16 values q: 128 + stored = 136 + q, as (word & 0x000F000F) | 0x43004300, less 136; all exact.
__device__ __forceinline__ u32 two(u32 word) {
    u32 v;
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(v) : "r"(word));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x3F803F80u), "r"(0xC308C308u));
    return v;
}

// Read anew where it is used: what follows from it would be kept in registers all along.
__device__ __forceinline__ int thread() {
    int v;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
    return v;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ __forceinline__ float exp2_of(float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}

// Programmatic dependent launch (sm_90 and later): the kernel before this one has ended, and what it wrote is there.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;");
#endif
}

// The kernel after this one may start as soon as there is room for it.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif

struct Item {
    int expert, first, count, tile;
};

struct Plan {
    const int *rows, *expert, *first, *count;
    int blocks, tiles;
};

__device__ __forceinline__ Item item_at(const Plan& plan, int index) {
    const int block = ORDER ? index % plan.blocks : index / plan.tiles;
    const int tile = ORDER ? index / plan.blocks : index % plan.tiles;
    return {load_index(plan.expert + block), load_index(plan.first + block), load_index(plan.count + block), tile};
}

// A lane's place in the weights and scales of each of its warp's row blocks, moving on with the steps.
struct Stream {
    const uint4* weights[RB];
    const uint2* scales[RB];
};

struct Stack {
    const uint4* weights;
    const uint2* scales;
    int written, k64;
};

// Past the last tile a warp reads the last block again; what it makes of it is not written.
__device__ __forceinline__ Stream stream_of(const Stack& stack, const Item& item, int step) {
    const int lane = thread() % 32, wr = thread() / (32 * KS);
    Stream stream;
#pragma unroll
    for (int r = 0; r < RB; r++) {
        const int unit = wr * RB + r;
        int block = item.tile * TILE + (GATED ? unit / 2 : unit);
        block = block < stack.written ? block : stack.written - 1;
        if (GATED) block += (unit & 1) * stack.written;
        const long long at = (long long)(item.expert * (GATED ? 2 : 1) * stack.written + block) * stack.k64 + step;
        stream.weights[r] = stack.weights + at * 32 + lane;
        stream.scales[r] = stack.scales + at * 8 + lane / 4;
    }
    return stream;
}

// The row of x that each of this lane's tokens is; -1 beyond the count.
__device__ __forceinline__ void tokens_of(int (&row)[NB], const Plan& plan, const Item& item, int share) {
    const int g = thread() % 32 / 4;
#pragma unroll
    for (int b = 0; b < NB; b++) {
        const int token = b * 8 + g;
        row[b] = token < item.count ? load_index(plan.rows + item.first + token) / share : -1;
    }
}

__device__ __forceinline__ void fetch(uint4 (&w)[RB], uint2 (&s)[RB], const Stream& stream, int step) {
#pragma unroll
    for (int r = 0; r < RB; r++) {
        w[r] = load_weights(stream.weights[r] + step * 32);
        s[r] = load_scales(stream.scales[r] + step * 8);
    }
}

// A lane's columns of each of its tokens: 8 of each group of 32. Absent tokens stay zero: nothing is read for them.
struct Columns {
    uint4 group[NB][2];
};

__device__ __forceinline__ void read_tokens(Columns& v, const u16* const (&token)[NB], int step) {
#pragma unroll
    for (int b = 0; b < NB; b++) {
        if (!token[b]) continue;
        v.group[b][0] = load_tokens(token[b] + step * 64);
        v.group[b][1] = load_tokens(token[b] + step * 64 + 32);
    }
}

// One group of 32 columns: words w0, w1 of a lane are two k16 steps; x holds the same columns of its token.
__device__ __forceinline__ void group(
    float (&acc)[4], u32 w0, u32 w1, const uint4& x, float low_rows, float high_rows
) {
    float c[4] = {};
    mma(c, two(w0), two(w0 >> 4), two(w0 >> 8), two(w0 >> 12), x.x, x.y);
    mma(c, two(w1), two(w1 >> 4), two(w1 >> 8), two(w1 >> 12), x.z, x.w);
    acc[0] += low_rows * c[0];
    acc[1] += low_rows * c[1];
    acc[2] += high_rows * c[2];
    acc[3] += high_rows * c[3];
}

// 64 columns of all row blocks of a warp.
__device__ __forceinline__ void multiply(
    float (&acc)[RB][NB][4], const uint4 (&w)[RB], const uint2 (&s)[RB], const Columns& x
) {
#pragma unroll
    for (int b = 0; b < NB; b++) {
#pragma unroll
        for (int r = 0; r < RB; r++)
            group(acc[r][b], w[r].x, w[r].y, x.group[b][0], as_float(s[r].x << 16), as_float(s[r].y << 16));
#pragma unroll
        for (int r = 0; r < RB; r++)
            group(acc[r][b], w[r].z, w[r].w, x.group[b][1],
                  as_float(s[r].x & 0xFFFF0000u), as_float(s[r].y & 0xFFFF0000u));
    }
}

typedef float Partial[UNITS][KS][NB][4][32];

__device__ __forceinline__ void keep(Partial& partial, const float (&acc)[RB][NB][4]) {
    const int lane = thread() % 32, ks = thread() / 32 % KS, wr = thread() / (32 * KS);
#pragma unroll
    for (int r = 0; r < RB; r++)
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) partial[wr * RB + r][ks][b][i][lane] = acc[r][b][i];
}

__device__ __forceinline__ float total(const Partial& partial, int unit, int token, int row) {
    const int lane = (row & 7) * 4 + (token & 7) / 2, i = (row >> 3) * 2 + (token & 1);
    float sum = 0.f;
#pragma unroll
    for (int q = 0; q < KS; q++) sum += partial[unit][q][token >> 3][i][lane];
    return sum;
}

__device__ __forceinline__ float result(const Partial& partial, int block, int token, int row) {
    if (!GATED) return total(partial, block, token, row);
    const float gate = total(partial, 2 * block, token, row), up = total(partial, 2 * block + 1, token, row);
    return gate * up / (1.f + exp2_of(-1.4426950408889634f * gate));
}

// Two rows a thread: eight threads write the 32 bytes of a row block.
__device__ __forceinline__ void write(u16* y, const Partial& partial, const Plan& plan, const Item& item, int written) {
    for (int i = thread(); i < item.count * TILE * 8; i += THREADS) {
        const int row = (i & 7) * 2, block = (i >> 3) % TILE, token = (i >> 3) / TILE;
        const int out = item.tile * TILE + block;
        if (out >= written) continue;
        const u64 pair = u64(load_index(plan.rows + item.first + token));
        const u32 both = pack_bf16(result(partial, block, token, row), result(partial, block, token, row + 1));
        *reinterpret_cast<u32*>(y + (pair * written + out) * 16 + row) = both;
    }
}

// written: row blocks of 16 in y (half of W's if GATED); k64: columns / 64; share: pairs that read one row of x.
extern "C" __global__ void __launch_bounds__(THREADS, MINB) int4_experts(
    const u16* __restrict__ x, const uint4* __restrict__ weights, const uint2* __restrict__ scales, u16* __restrict__ y,
    const int* __restrict__ rows, const int* __restrict__ block_expert, const int* __restrict__ block_first,
    const int* __restrict__ block_count, const int* __restrict__ num_blocks, int written, int k64, int share
) {
    __shared__ Partial partial[2];
    // Gate and up come right after the plan. Down comes after gate and up, which let it start only once they had waited
    // for the plan: it may read that, and weights, before gate and up have ended.
    if (GATED) wait_for_inputs();
    let_next_start();
    const int tiles = (written + TILE - 1) / TILE;
    const Plan plan = {rows, block_expert, block_first, block_count, load_index(num_blocks), tiles};
    const Stack stack = {weights, scales, written, k64};
    const u64 items = u64(plan.blocks) * tiles;
    int index = int(blockIdx.x);
    const int stop = int(items), stride = int(gridDim.x);
    if (ORDER && index >= stop) {
        wait_for_inputs();  // else this kernel could be over before the one it follows
        return;
    }
    // Where the place of an item does not depend on their number, both are on their way at once.
    const Item first_item = item_at(plan, index);
    if (index >= stop) {
        wait_for_inputs();
        return;
    }

    const int ks = thread() / 32 % KS, column = thread() % 4 * 8;
    const int first_step = ks * k64 / KS, steps = (ks + 1) * k64 / KS - first_step;

    uint4 w[PF][RB];
    uint2 s[PF][RB];
    int row[NB];
    Stream stream = stream_of(stack, first_item, first_step);
#pragma unroll
    for (int p = 0; p < PF; p++)
        if (p < steps) fetch(w[p], s[p], stream, p);
    if (!GATED) wait_for_inputs();
    tokens_of(row, plan, first_item, share);

    const int padded = (steps + PF - 1) / PF * PF;
    for (int turn = 0;; turn ^= 1) {
        const u16* token[NB];
#pragma unroll
        for (int b = 0; b < NB; b++)
            token[b] = row[b] < 0 ? nullptr : x + (u64(row[b]) * k64 + first_step) * 64 + column;
        float acc[RB][NB][4] = {};
        Columns columns = {};
        const bool more = index + stride < stop;
        for (int step = 0; step < padded; step += PF) {
            const bool last = step + PF >= padded;
            if (last && more) {  // what follows this item's last step is the next item's first
                const Item next = item_at(plan, index + stride);
                stream = stream_of(stack, next, first_step - PF);
                tokens_of(row, plan, next, share);
            }
            const int left = steps - step, coming = !last ? left - PF : more ? steps : 0;
#pragma unroll
            for (int p = 0; p < PF; p++) {
                if (EVEN || p < left) read_tokens(columns, token, p);
                if (EVEN || p < left) multiply(acc, w[p], s[p], columns);
                if (EVEN ? coming > 0 : p < coming) fetch(w[p], s[p], stream, p + PF);
            }
#pragma unroll
            for (int b = 0; b < NB; b++)
                if (token[b]) token[b] += PF * 64;
#pragma unroll
            for (int r = 0; r < RB; r++) {
                stream.weights[r] += PF * 32;
                stream.scales[r] += PF * 8;
            }
        }

        // Two buffers: the barrier of the next item says that everyone has read this one.
        keep(partial[turn], acc);
        __syncthreads();
        write(y, partial[turn], plan, item_at(plan, index), written);
        if (!more) return;
        index += stride;
    }
}
