// INT4 x bf16 products for many tokens an expert: an item is 256 weight rows x up to BLOCK tokens of one expert.
//
// Weights are the A operand (M) in registers, tokens the B operand (N) in shared memory. Both arrive by cp.async in
// stages of 64 columns. A word of eight weights becomes four A registers: 128 + stored by one AND-OR each, less 136
// (exact), times the scale (rounded once, as a dequantised matrix is). Two main loops share the rest:
//   HOPPER=1  wgmma: one warpgroup loads, two multiply (2 x m64 each). The instruction's n follows the block's count.
//             A CTA takes every gridDim-th item, so that the next item is loaded while this one is written.
//   HOPPER=0  mma.sync m16n8k16: eight warps load and multiply; blocks of eight tokens beyond the count are skipped.
// Macros: GATED (rows are gate then up; writes silu(gate) * up), BLOCK (most tokens, a multiple of 16), STAGES, HOPPER,
// NSTEP (HOPPER: granularity of n), LAG (HOPPER: stages in flight before the loader waits for the oldest), EMULATED
// (a test runs this file on a CPU and brings its own instructions).
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int SLOTS = 16;  // row blocks of 16 an item
constexpr int X_BYTES = BLOCK * 128, W_BYTES = SLOTS * 512, S_BYTES = SLOTS * 64;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES + S_BYTES;
constexpr int COLS = GATED ? 128 : 256;      // output columns of an item
constexpr int LOADERS = HOPPER ? 128 : 256;  // threads that copy
constexpr int WRITERS = 256;                 // threads that hold accumulators
constexpr int GROUP = HOPPER ? 128 : 256;    // of them, those that stage their output together
constexpr int GROUPS = WRITERS / GROUP, WIDTH = COLS / GROUPS;
constexpr int PITCH = WIDTH * 2 + 16;  // of staged output: lanes (g, t) fall on banks 4g + t
constexpr int OUT_BYTES = 16 * PITCH;  // sixteen tokens

#ifndef EMULATED
#define D __device__ __forceinline__
#define ASM asm volatile
#define MEM "memory"
#define W(x) "=r"(x)
#define R(x) "r"(x)
extern __shared__ char memory[];
D u32 shared_memory() { u64 r; asm("cvta.to.shared.u64 %0, %1;" : "=l"(r) : "l"(memory)); return (u32)r; }
D void copy16(u32 a, const void* p) { ASM("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::R(a), "l"(p) : MEM); }
D void copy4(u32 a, const void* p) { ASM("cp.async.ca.shared.global [%0], [%1], 4;" ::R(a), "l"(p) : MEM); }
D void commit_copies() { ASM("cp.async.commit_group;" ::: MEM); }
template <int N> D void wait_copies() { ASM("cp.async.wait_group %0;" ::"n"(N) : MEM); }
D u32 lds(u32 a) { u32 r; ASM("ld.shared.u32 %0, [%1];" : W(r) : R(a)); return r; }
D uint2 lds2(u32 a) { uint2 r; ASM("ld.shared.v2.u32 {%0,%1}, [%2];" : W(r.x), W(r.y) : R(a)); return r; }
#define ALL(op, v) op(v.x), op(v.y), op(v.z), op(v.w)
D uint4 lds4(u32 a) { uint4 r; ASM("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : ALL(W, r) : R(a)); return r; }
D void sts(u32 at, u32 v) { ASM("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : MEM); }
D void store16(u16* p, uint4 v) { ASM("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), ALL(R, v) : MEM); }
// These two are read anew wherever they are wanted: nothing that follows from them stays in registers over a main loop.
D int thread_id() { int r; ASM("mov.u32 %0, %%tid.x;" : "=r"(r)); return r; }
D int load_count(const int* p) { int r; ASM("ld.global.nc.s32 %0, [%1];" : "=r"(r) : "l"(p)); return r; }
#define TERNARY(name, op) D u32 name(u32 a, u32 b, u32 c) { u32 r; asm(op : W(r) : R(a), R(b), R(c)); return r; }
TERNARY(prmt, "prmt.b32 %0, %1, %2, %3;")
TERNARY(and_or, "lop3.b32 %0, %1, %2, %3, 0xEA;")
TERNARY(fma2, "fma.rn.bf16x2 %0, %1, %2, %3;")
D u32 pack(float l, float h) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(h), "f"(l)); return r; }
// An 8 x 8 fragment (weight row g, tokens 2t, 2t + 1) becomes (token g, weight rows 2t, 2t + 1).
D u32 turned(u32 a) { u32 r; ASM("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a)); return r; }
D float exp_of(float a) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a * 1.442695041f)); return r; }
D float inverse(float a) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
template <int THREADS> D void sync_some(int which) { ASM("bar.sync %0, %1;" ::"r"(which), "n"(THREADS) : MEM); }

#if HOPPER
D void barrier_start(u32 at, u32 n) { ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(n) : MEM); }
D void barriers_started() { ASM("fence.mbarrier_init.release.cluster;" ::: MEM); }
D void arrive(u32 at) { ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : MEM); }
D void await(u32 at, u32 parity) {
  ASM("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
      ::"r"(at), "r"(parity) : MEM);
}
D void fence_copies() { ASM("fence.proxy.async.shared::cta;" ::: MEM); }
// 384 threads begin with 168 each.
constexpr int MANY = BLOCK > 128 ? 240 : 224, FEW = 3 * 168 - 2 * MANY;
D void few_registers() { ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW)); }
D void many_registers() { ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY)); }
template <int PENDING> D void wait_products() { ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : MEM); }

#define Q8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define Q16 Q8(0, 1, 2, 3, 4, 5, 6, 7)
#define Q32 Q16 "," Q8(8, 9, 10, 11, 12, 13, 14, 15)
#define Q48 Q32 "," Q8(16, 17, 18, 19, 20, 21, 22, 23)
#define Q64 Q48 "," Q8(24, 25, 26, 27, 28, 29, 30, 31)
#define Q80 Q64 "," Q8(32, 33, 34, 35, 36, 37, 38, 39)
#define Q96 Q80 "," Q8(40, 41, 42, 43, 44, 45, 46, 47)
#define Q112 Q96 "," Q8(48, 49, 50, 51, 52, 53, 54, 55)
#define Q128 Q112 "," Q8(56, 57, 58, 59, 60, 61, 62, 63)
#define Q160 Q128 "," Q8(64, 65, 66, 67, 68, 69, 70, 71) "," Q8(72, 73, 74, 75, 76, 77, 78, 79)
#define Q192 Q160 "," Q8(80, 81, 82, 83, 84, 85, 86, 87) "," Q8(88, 89, 90, 91, 92, 93, 94, 95)
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16 C4(0), C4(4)
#define C32 C16, C4(8), C4(12)
#define C48 C32, C4(16), C4(20)
#define C64 C48, C4(24), C4(28)
#define C80 C64, C4(32), C4(36)
#define C96 C80, C4(40), C4(44)
#define C112 C96, C4(48), C4(52)
#define C128 C112, C4(56), C4(60)
#define C192 C128, C4(64), C4(68), C4(72), C4(76), C4(80), C4(84), C4(88), C4(92)
// Begins c (64 x n) += a (64 x 16, registers) * b (n x 16, shared, K-major), a group of its own.
template <int N> D void product(float (&c)[N / 2], const u32 (&a)[4], u64 tokens);
#define WGMMA(n, a0, a1, a2, a3, b)                                                                                    \
  template <> D void product<n>(float (&c)[n / 2], const u32 (&a)[4], u64 tokens) {                                    \
    ASM("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.fence.sync.aligned;\n"                                      \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" Q##n "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, " \
        "%" #b ", add, 1, 1, 0;\nwgmma.commit_group.sync.aligned;\n}"                                                  \
        : C##n : R(a[0]), R(a[1]), R(a[2]), R(a[3]), "l"(tokens) : MEM);                                               \
  }
WGMMA(16, 8, 9, 10, 11, 12)
WGMMA(32, 16, 17, 18, 19, 20)
WGMMA(48, 24, 25, 26, 27, 28)
WGMMA(64, 32, 33, 34, 35, 36)
WGMMA(80, 40, 41, 42, 43, 44)
WGMMA(96, 48, 49, 50, 51, 52)
WGMMA(112, 56, 57, 58, 59, 60)
WGMMA(128, 64, 65, 66, 67, 68)
WGMMA(192, 96, 97, 98, 99, 100)
#else
D void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  ASM("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
#endif

struct Args {
  const u16* x;         // [T or P, 64 * k64] bf16
  const char* weights;  // [experts, row blocks, k64, 32 lanes, 16 bytes]
  const char* scales;   // [experts, row blocks, k64, 8 g, 8 bytes]
  u16* y;               // [P, width]
  const int *rows, *expert, *first, *count, *blocks;
  int choices, limit, width, k64, tiles;
  u32 stages, barriers, pairs, out;  // shared addresses
};
D int items(const Args& p) { return load_count(p.blocks) * p.tiles; }

// Nibbles 0 and 4 of a word as two weights: (128 + stored) - 136, then times the scale; x * 1 - 136 and x * s - 0 are
// what every architecture since sm_80 has for a difference and a product of bf16 pairs.
D u32 weights2(u32 word, u32 scale) {
  return fma2(fma2(and_or(word, 0x000F000Fu, 0x43004300u), 0x3F803F80u, 0xC308C308u), scale, 0x80008000u);
}
D void dequantise(u32 (&a)[4], u32 word, u32 scale_g, u32 scale_g8) {
  a[0] = weights2(word, scale_g);
  a[1] = weights2(word >> 4, scale_g8);
  a[2] = weights2(word >> 8, scale_g);
  a[3] = weights2(word >> 12, scale_g8);
}

// Where a 16-byte piece of a token's 128 bytes lies. wgmma asks for its 128-byte swizzle; the other loop reads pieces
// 4h + t of eight rows at once, so two neighbouring rows must take different halves.
D u32 piece_of(u32 row, u32 piece) { return (piece ^ (HOPPER ? row & 7 : (row & 1) << 2 | (row >> 1 & 3))) << 4; }
// Where a lane's four words lie among the 32 of a row block: eight lanes of any read fall on different banks.
D u32 words_of(u32 lane) { return (lane ^ (lane >> 3)) << 4; }

// What one thread copies of every stage of an item, in pieces of 16 bytes from the arrays' beginnings: pieces of
// tokens' rows, of row blocks, and of scales.
constexpr int X_COPIES = (BLOCK * 8 + LOADERS - 1) / LOADERS, W_COPIES = SLOTS * 32 / LOADERS;
struct Copies {
  u32 x[X_COPIES], w[W_COPIES], s;
  int rows;  // of the item from this thread's first on
};
D u32 row_block(const Args& p, int block, int tile, int slot) {
  int first = GATED ? tile * 8 + (slot & 7) : tile * SLOTS + slot;
  // Past the edge the last block is loaded again; nothing of it is stored.
  int within = (first < p.limit ? first : p.limit - 1) + (GATED ? (slot >> 3) * p.limit : 0);
  return (u32)(p.expert[block] * (p.limit * (GATED ? 2 : 1)) + within) * (u32)p.k64;
}
D void find_copies(const Args& p, int index, int thread, Copies& c) {
  int block = index / p.tiles, tile = index % p.tiles, row = thread >> 3;
  const int* pairs = p.rows + p.first[block] + row;
  c.rows = p.count[block] - row;
#pragma unroll
  for (int i = 0; i < X_COPIES; i++) {
    u32 pair = i * (LOADERS / 8) < c.rows ? pairs[i * (LOADERS / 8)] : 0;
    c.x[i] = pair / (u32)p.choices * (u32)(p.k64 * 8) + (thread & 7);
  }
#pragma unroll
  for (int i = 0; i < W_COPIES; i++)
    c.w[i] = row_block(p, block, tile, (thread >> 5) + i * (LOADERS / 32)) * 32 + (thread & 31);
  c.s = row_block(p, block, tile, (thread >> 2) & (SLOTS - 1)) * 4 + (thread & 3);
}
// One stage: rows of the item's tokens, weights and scales of 16 row blocks, all for columns 64 kb .. 64 kb + 63.
// Rows past the count stay as they are: their products go nowhere.
D void load_stage(const Args& p, const Copies& c, int kb, u32 stage, int thread) {
  u32 row = thread >> 3, to = stage + row * 128 + piece_of(row, thread & 7);
  const char* x = (const char*)p.x + (u64)kb * 128;
#pragma unroll
  for (int i = 0; i < X_COPIES; i++)
    if (i * (LOADERS / 8) < c.rows) copy16(to + i * (LOADERS * 16), x + c.x[i] * 16ull);
  to = stage + X_BYTES + (thread >> 5) * 512 + words_of(thread & 31);
#pragma unroll
  for (int i = 0; i < W_COPIES; i++) copy16(to + i * (LOADERS * 16), p.weights + kb * 512ull + c.w[i] * 16ull);
  if (thread < SLOTS * 4) copy16(stage + X_BYTES + W_BYTES + thread * 16, p.scales + kb * 64ull + c.s * 16ull);
}

// Eight tokens of two row blocks into the staged output: 16 columns of silu(gate) * up, or two times 16, `apart`.
D void stage_output(u32 out, int column, int token, const float* c, const float* second, int apart, int lane) {
  u32 at = out + (token + (lane >> 2)) * PITCH + (column + (lane & 3) * 2) * 2;
  float r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = GATED ? c[i] * inverse(1.0f + exp_of(-c[i])) * second[i] : c[i];
  sts(at, turned(pack(r[0], r[1])));
  sts(at + 16, turned(pack(r[2], r[3])));
  if (GATED) return;
  sts(at + apart * 2, turned(pack(second[0], second[1])));
  sts(at + apart * 2 + 16, turned(pack(second[2], second[3])));
}
// Each group keeps the item's pairs; they are waited for before the first output.
D void load_pairs(const Args& p, const int* pairs, int count, int group, int thread) {
  for (int i = thread; i < count; i += GROUP) copy4(p.pairs + (group * BLOCK + i) * 4, pairs + i);
}
// Sixteen staged tokens to the pairs' rows of y, 16 bytes a thread. A group of wgmma's holds columns in runs of 64.
D void write_output(const Args& p, u32 out, int tile, int token0, int count, int group, int thread) {
  constexpr int PIECES = WIDTH / 8;
  int piece = thread % PIECES, column = piece * 8;
  if (HOPPER) column = (column & 64) * 2 + group * 64 + (column & 63);
  column += tile * COLS;
  if (column >= p.width) return;
#pragma unroll
  for (int i = thread / PIECES; i < 16; i += GROUP / PIECES) {
    if (token0 + i >= count) return;
    u32 pair = lds(p.pairs + (group * BLOCK + token0 + i) * 4);
    store16(p.y + (u64)pair * (u32)p.width + column, lds4(out + i * PITCH + piece * 16));
  }
}

#if HOPPER
// The loader: a stage is announced LAG stages after its copies were issued, when they have landed. Its own threads
// wait for their copies and order them before wgmma's reads (another proxy), then all of them arrive.
static_assert(LAG <= STAGES - 2, "the multipliers free a stage when they have begun the next");
D void load_all(const Args& p, int thread) {
  u32 full = p.barriers, empty = full + STAGES * 8, slot = 0, parity = 1, done = 0;
  for (int index = blockIdx.x; index < items(p); index += gridDim.x) {
    Copies copies;
    find_copies(p, index, thread, copies);
    for (int kb = 0; kb < p.k64 + LAG; kb++) {
      if (kb < p.k64) {
        await(empty + slot * 8, parity);
        load_stage(p, copies, kb, p.stages + slot * STAGE_BYTES, thread);
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
      commit_copies();
      if (kb < LAG) continue;
      wait_copies<LAG>();
      fence_copies();
      arrive(full + done * 8);
      if (++done == STAGES) done = 0;
    }
  }
}

// wgmma takes B's columns in their own order, so lane t must hold columns 2t, 2t + 1 and 2t + 8, 2t + 9 of each 16.
// Stored words hold eight neighbouring columns a lane: those wanted lie in the words of lanes 2s and 2s + 1 (step s of
// a group), word t / 2 of the group, bytes 0 and 2 (even t) or 1 and 3 (odd t). One byte permutation makes them one
// word in the same form.
template <int N> D void multiply(const Args& p, int index, u32& turn) {
  float c[2][N / 2];
  u32 a[2][4];
#pragma unroll
  for (int i = 0; i < N / 2; i++) c[0][i] = c[1][i] = 0.0f;
  int thread = thread_id(), lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  u32 full = p.barriers, empty = full + STAGES * 8;
  u32 own = warp * 512 + g * 64 + (g >> 1) * 16 + (t >> 1) * 4, selector = t & 1 ? 0x7351 : 0x6240;
  for (int kb = p.k64; kb > 0; kb--) {
    u32 slot = turn % STAGES;
    await(full + slot * 8, turn / STAGES & 1);
    u32 stage = p.stages + slot * STAGE_BYTES, scales = stage + X_BYTES + W_BYTES + (own >> 3 & ~7u);
    uint2 scale[2] = {lds2(scales), lds2(scales + 8 * 64)};
    // 128-byte swizzle, eight rows every 1024 bytes; a step of 16 columns is 32 bytes on.
    u64 tokens = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (stage & 0x3FFFF) >> 4;
#pragma unroll
    for (int u = 0; u < 8; u++) {
      int step = u >> 1, m = u & 1, h = step >> 1, s = step & 1;
      u32 at = stage + X_BYTES + own + m * 8 * 512 + h * 8, pick = h ? 0x3232 : 0x1010;
      u32 word = prmt(lds(at ^ (2 * s) << 4), lds(at ^ (2 * s + 1) << 4), selector);
      wait_products<1>();  // those that read a[m] are done
      if (u == 1 && kb != p.k64 && lane == 0) arrive(empty + (slot ? slot - 1 : STAGES - 1) * 8);
      dequantise(a[m], word, prmt(scale[m].x, 0, pick), prmt(scale[m].y, 0, pick));
      product<N>(c[m], a[m], tokens + step * 2);
    }
    if (++turn == 2 * STAGES) turn = 0;
  }
  wait_products<0>();
  thread = thread_id(), lane = thread & 31, warp = thread >> 5;
  if (lane == 0) arrive(empty + ((turn ? turn : STAGES) - 1) % STAGES * 8);
  wait_copies<0>();
  int group = warp >> 2, tile = index % p.tiles, count = p.count[index / p.tiles];
  warp &= 3, thread &= GROUP - 1;
#pragma unroll
  for (int n = 0; n < N / 8; n++) {
    u32 out = p.out + (group * 2 + (n >> 1 & 1)) * OUT_BYTES;
    stage_output(out, warp * 16, (n & 1) * 8, &c[0][n * 4], &c[1][n * 4], 64, lane);
    if (n & 1) {
      sync_some<GROUP>(group + 1);  // the other buffer's readers have passed too
      write_output(p, out, tile, n / 2 * 16, count, group, thread);
    }
  }
}
template <int N> D void multiply_least(const Args& p, int index, int count, u32& turn) {
  if constexpr (N > NSTEP) {
    if (count <= N - NSTEP) return multiply_least<N - NSTEP>(p, index, count, turn);
  }
  multiply<N>(p, index, turn);
}
D void multiply_all(const Args& p) {
  u32 turn = 0;  // of 2 * STAGES: the stage and its parity
  for (int index = blockIdx.x; index < items(p); index += gridDim.x) {
    int block = index / p.tiles, count = p.count[block], thread = thread_id(), group = thread / GROUP;
    sync_some<GROUP>(group + 1);  // the pairs of the item before are read
    load_pairs(p, p.rows + p.first[block], count, group, thread % GROUP);
    commit_copies();
    multiply_least<BLOCK>(p, index, count, turn);
  }
}
D void run(const Args& p) {
  int thread = thread_id();
  if (thread == 0) {
    for (int i = 0; i < 2 * STAGES; i++) barrier_start(p.barriers + i * 8, i < STAGES ? LOADERS : WRITERS / 32);
    barriers_started();
  }
  __syncthreads();
  if (thread >= WRITERS) few_registers(), load_all(p, thread - WRITERS);
  else many_registers(), multiply_all(p);
}
#else
// Warp (row, side): row blocks 2 row, 2 row + 1 and those plus 8 (the up rows of the same columns), and every second
// block of eight tokens. A word's columns 8t .. 8t + 3 or 8t + 4 .. 8t + 7 meet the token's same columns: the order of
// columns within a group is any, if it is one.
D void multiply(const Args& p, const Copies& copies, int tile, int count, int thread) {
  constexpr int BLOCKS = BLOCK / 16;
  float c[4][BLOCKS][4] = {};
  int lane = thread & 31, warp = thread >> 5, row = warp >> 1, side = warp & 1, g = lane >> 2, t = lane & 3;
  u32 words = X_BYTES + row * 1024 + words_of(lane), scales = X_BYTES + W_BYTES + row * 128 + g * 8;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < p.k64) load_stage(p, copies, i, p.stages + i * STAGE_BYTES, thread);
    commit_copies();
  }
  for (int kb = 0, slot = 0; kb < p.k64; kb++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    int next = kb + STAGES - 1, free = slot ? slot - 1 : STAGES - 1;
    if (next < p.k64) load_stage(p, copies, next, p.stages + free * STAGE_BYTES, thread);
    commit_copies();
    u32 stage = p.stages + slot * STAGE_BYTES;
    if (++slot == STAGES) slot = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 a[2][4][4], pick = h ? 0x3232 : 0x1010;
#pragma unroll
      for (int m = 0; m < 4; m++) {
        int block = (m >> 1) * 8 + (m & 1);
        uint2 word = lds2(stage + words + block * 512 + h * 8), scale = lds2(stage + scales + block * 64);
        u32 scale_g = prmt(scale.x, 0, pick), scale_g8 = prmt(scale.y, 0, pick);
        dequantise(a[0][m], word.x, scale_g, scale_g8);
        dequantise(a[1][m], word.y, scale_g, scale_g8);
      }
#pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        int token = (n * 2 + side) * 8;
        if (token >= count) continue;
        uint4 b = lds4(stage + (token + g) * 128 + piece_of(g, h * 4 + t));
#pragma unroll
        for (int m = 0; m < 4; m++) mma(c[m][n], a[0][m], b.x, b.y);
#pragma unroll
        for (int m = 0; m < 4; m++) mma(c[m][n], a[1][m], b.z, b.w);
      }
    }
  }
  wait_copies<0>();
#pragma unroll
  for (int n = 0; n < BLOCKS; n++) {
    u32 out = p.out + (n & 1) * OUT_BYTES;
#pragma unroll
    for (int m = 0; m < 2; m++) stage_output(out, row * 32 + m * 16, side * 8, c[m][n], c[m + 2][n], 128, lane);
    __syncthreads();  // the other buffer's readers have passed too
    write_output(p, out, tile, n * 16, count, 0, thread);
  }
}
D void run(const Args& p) {
  int thread = thread_id();
  for (int index = blockIdx.x; index < items(p); index += gridDim.x) {
    int block = index / p.tiles, count = p.count[block];
    Copies copies;
    find_copies(p, index, thread, copies);
    __syncthreads();  // the item before is written
    load_pairs(p, p.rows + p.first[block], count, 0, thread);
    multiply(p, copies, index % p.tiles, count, thread);
  }
}
#endif

// x [T or P, 64 k64]; a token's row is pair / choices (1: a row a pair). limit: row blocks of the output.
// Items are (block, row tile), the tiles of one block next to each other: they share its tokens through L2.
extern "C" __global__ void __launch_bounds__(HOPPER ? 384 : 256, 1)
    int4_prefill(const u16* x, const char* weights, const char* scales, u16* y, const int* rows, const int* expert,
                 const int* first, const int* count, const int* blocks, int choices, int limit, int k64, int tiles) {
  Args p = {x, weights, scales, y, rows, expert, first, count, blocks, choices, limit, limit * 16, k64, tiles};
  p.stages = (shared_memory() + 1023) & ~1023u, p.barriers = p.stages + STAGES * STAGE_BYTES;
  p.pairs = p.barriers + STAGES * 16, p.out = p.pairs + GROUPS * BLOCK * 4;
  run(p);
}
