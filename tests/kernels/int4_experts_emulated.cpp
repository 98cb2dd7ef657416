// Runs int4_experts.cu on a CPU: lanes are fibers, a product of the tensor cores is where the lanes of a warp meet.
// Loads are checked: inside their array, and on their alignment. Compiled by test_int4_experts.py with -DSOURCE="...".
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EMULATED
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
static Index blockIdx, gridDim;

struct Range { const char* begin; size_t bytes; };
static Range ranges[4];  // x, weights, scales, ints are not checked
static long bad, weight_loads;

static void check(const void* p, size_t bytes, const Range& range) {
    const size_t at = (const char*)p - range.begin;
    if ((const char*)p < range.begin || at + bytes > range.bytes || (uintptr_t)p % bytes) bad++;
}

struct Meeting { int count = 0, turn = 0; };
struct Lane { ucontext_t context; std::vector<char> stack; bool done = false; };
static std::vector<Lane> lanes;
static std::vector<Meeting> warps;
static Meeting block;
static ucontext_t scheduler;
static int current;
static long progress;

static void meet(Meeting& meeting, int count) {
    const int turn = meeting.turn;
    if (++meeting.count == count) meeting.count = 0, meeting.turn++, progress++;
    else while (meeting.turn == turn) swapcontext(&lanes[current].context, &scheduler);
}

static int thread() { return current; }
static void __syncthreads() { meet(block, (int)lanes.size()); }

static float as_float(unsigned bits) { float v; memcpy(&v, &bits, 4); return v; }
static unsigned as_bits(float v) { unsigned bits; memcpy(&bits, &v, 4); return bits; }
static unsigned bf16(float v) {
    const unsigned bits = as_bits(v);
    return std::isnan(v) ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
static unsigned pack_bf16(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline void wait_for_inputs() {}
inline void let_next_start() {}
static float exp2_of(float v) { return exp2f(v); }

static uint4 load_weights(const uint4* p) { check(p, 16, ranges[1]); weight_loads++; return *p; }
static uint2 load_scales(const uint2* p) { check(p, 8, ranges[2]); return *p; }
static uint4 load_tokens(const unsigned short* p) { check(p, 16, ranges[0]); uint4 v; memcpy(&v, p, 16); return v; }
static int load_index(const int* p) { return *p; }

static unsigned two(unsigned word) {
    const unsigned v = (word & 0x000F000F) | 0x43004300;
    return pack_bf16(as_float(v << 16) - 136.f, as_float(v & 0xFFFF0000u) - 136.f);
}

struct Operands { unsigned a[4], b[2]; };
static std::vector<Operands> operands;

static float half_of(unsigned pair, int which) { return as_float(which ? pair & 0xFFFF0000u : pair << 16); }

static void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = current % 32, warp = current / 32, g = lane / 4, t = lane % 4;
    operands[current] = {{a0, a1, a2, a3}, {b0, b1}};
    meet(warps[warp], 32);
    const Operands* all = &operands[warp * 32];
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 16; k++) {
            const int owner = k % 8 / 2, upper = k / 8;
            const float a = half_of(all[row % 8 * 4 + owner].a[upper * 2 + row / 8], k % 2);
            const float b = half_of(all[column * 4 + owner].b[upper], k % 2);
            c[i] += a * b;
        }
    }
    meet(warps[warp], 32);
}

#include SOURCE

static struct {
    const u16* x; const uint4* weights; const uint2* scales; u16* y;
    const int *rows, *expert, *first, *count, *blocks;
    int written, k64, share;
} call;

static void enter() {
    int4_experts(call.x, call.weights, call.scales, call.y, call.rows, call.expert, call.first, call.count, call.blocks,
                 call.written, call.k64, call.share);
    lanes[current].done = true;
    progress++;
    swapcontext(&lanes[current].context, &scheduler);
}

static void run_block() {
    lanes = std::vector<Lane>(THREADS);
    warps = std::vector<Meeting>(THREADS / 32);
    operands.resize(THREADS);
    block = Meeting();
    for (Lane& lane : lanes) {
        lane.stack.resize(64 << 10);
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.data();
        lane.context.uc_stack.ss_size = lane.stack.size();
        makecontext(&lane.context, enter, 0);
    }
    for (bool any = true; any;) {
        any = false;
        const long before = progress;
        for (current = 0; current < THREADS; current++) {
            if (lanes[current].done) continue;
            any = true;
            swapcontext(&scheduler, &lanes[current].context);
        }
        if (any && progress == before) { bad = -1; return; }  // some wait for lanes that have left
    }
}

// Returns what went wrong: loads outside or unaligned, -1 for lanes that never met; loads counts 16-byte weight loads.
extern "C" long emulate(
    int grid, const u16* x, long x_bytes, const uint4* weights, long weights_bytes, const uint2* scales,
    long scales_bytes, u16* y, const int* rows, const int* expert, const int* first, const int* count,
    const int* blocks, int written, int k64, int share, long* loads
) {
    ranges[0] = {(const char*)x, (size_t)x_bytes};
    ranges[1] = {(const char*)weights, (size_t)weights_bytes};
    ranges[2] = {(const char*)scales, (size_t)scales_bytes};
    call = {x, weights, scales, y, rows, expert, first, count, blocks, written, k64, share};
    bad = weight_loads = 0;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid && bad != -1; blockIdx.x++) run_block();
    *loads = weight_loads;
    return bad;
}
