// The sum of a small tensor over the GPUs of a tensor group: every rank sends its values to all others at once.
//
// Macros: RANKS of the group, THREADS a block, FLOAT (1: float32, 0: bfloat16), REFRESH (one less than a power of two).
//
// A rank owns a buffer in its own memory that the others write to: for either parity of an epoch, and for each sender, a
// place for every value. A thread has 16 bytes of the tensor. It writes them to its place in every other rank's buffer,
// waits until the others' have come to the same place in its own, adds all in float32 in the order of ranks (so every
// rank has the same bits), and overwrites the 16 bytes. What is sent is four words of 64 bits, each of 32 bits of data
// and the epoch, and such a word arrives whole: it says itself that it is there. So no flag follows the data, no fence
// holds either back, and threads of a block do not wait for each other: the time is one trip through the link. (NCCL's
// LL protocol sends such words too.)
//
// Epochs. Block b counts its own launches in epochs[b], in device memory, so replays of a graph count on. All ranks make
// the same reductions in the same order, so the blocks b of all ranks agree on the epoch; they talk to each other alone,
// in a part of the buffers that is theirs. All that follows is of one such family of blocks.
//
// Nothing is overwritten before it was read. Let rank A write the words of epoch n + 2 into B's buffer, where those of
// epoch n lie. In A's stream
//   (1) epoch n + 1 ended before: a kernel begins, or passes `wait_for_inputs`, when all before it have ended;
//   (2) so a word of epoch n + 1 from B had come to A: a block that runs has at least one thread with data, and that
//       thread waits for all ranks;
//   (3) so B's kernel of epoch n + 1 had begun to write, and by (1) B's kernel of epoch n had ended: B had read all
//       that came for n, since a thread's result depends on what it reads.
// Two buffers are enough, and no barrier is needed at the end. Nor are two writes to one place ever under way: the earlier
// has been read.
//
// Nothing old is taken for new. A place holds zero at first, and epochs begin at 1; later it holds some older epoch of
// the same block. Equal it could be only after 2^32 launches. A place that no message of a block's reached for so long is
// impossible: in two epochs of every REFRESH + 1 a thread without data stamps its places in its own buffer with the
// epoch. No other rank writes to them then: not for this epoch, in which it has no data there either, nor for the one
// after the next, by the proof above.
//
// Nothing waits for ever, as long as all ranks come to this reduction: a block waits only for what the same block of
// another rank sends before it waits itself, and all blocks fit on a device at once. A rank that never comes leaves this
// kernel waiting; the host's deadline for the plan then ends the process.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct alignas(16) Quad {
    u32 x[4];
};

struct Words {
    u64 word[4];
};

constexpr int VALUES = FLOAT ? 4 : 8;  // in 16 bytes
static_assert(RANKS >= 2 && RANKS <= 8, "addresses of eight buffers are passed");

#ifndef EMULATED  // the tests run this file on the CPU, with their own forms of the instructions below
#define DEVICE __device__ __forceinline__

// Each of the two words is one access of 64 bits to the memory model, seen by all GPUs whole or not at all.
DEVICE void send_two(u64* p, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" :: "l"(p), "l"(first), "l"(second) : "memory");
}

DEVICE void look_at_two(const u64* p, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}

DEVICE float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE u16 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }

// Where the launch allows it, this kernel starts while the one that makes its values still runs. Nothing may be read or
// written before.
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

DEVICE void add(float* sums, Quad values) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (FLOAT) {
            sums[i] += as_float(values.x[i]);
        } else {
            sums[2 * i] += from_bf16(values.x[i] & 0xFFFF);
            sums[2 * i + 1] += from_bf16(values.x[i] >> 16);
        }
    }
}

DEVICE Quad pack(const float* sums) {
    Quad y;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        y.x[i] = FLOAT ? as_bits(sums[i]) : (u32)to_bf16(sums[2 * i]) | (u32)to_bf16(sums[2 * i + 1]) << 16;
    return y;
}

// A sender's place in a buffer for this thread: two pairs of words THREADS pairs apart, so that a warp's lie together.
DEVICE u64* place(u64* buffer, u32 epoch, int sender, int most_blocks) {
    const u64 block = ((u64)(epoch & 1) * RANKS + sender) * most_blocks + blockIdx.x;
    return buffer + (block * THREADS * 2 + threadIdx.x) * 2;
}

DEVICE void send(u64* to, Quad values, u64 stamp) {
    send_two(to, stamp | values.x[0], stamp | values.x[1]);
    send_two(to + THREADS * 2, stamp | values.x[2], stamp | values.x[3]);
}

// data: `vectors` times 16 bytes, replaced by their sum. mine, buffer_r: this rank's and rank r's, as this process sees it.
extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce(Quad* data, int vectors, int rank, int most_blocks, u32* epochs, u64* mine, u64* buffer_0, u64* buffer_1,
           u64* buffer_2, u64* buffer_3, u64* buffer_4, u64* buffer_5, u64* buffer_6, u64* buffer_7) {
    wait_for_inputs();
    u64* const buffers[8] = {buffer_0, buffer_1, buffer_2, buffer_3, buffer_4, buffer_5, buffer_6, buffer_7};
    const int vector = blockIdx.x * THREADS + threadIdx.x;
    const u32 epoch = epochs[blockIdx.x];
    const u64 stamp = (u64)epoch << 32;

    if (vector < vectors) {
        const Quad own = data[vector];
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) send(place(buffers[r], epoch, rank, most_blocks), own, stamp);
        Words came[RANKS];
        bool all_here;
        do {
            all_here = true;
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (r == rank) continue;
                const u64* from = place(mine, epoch, r, most_blocks);
                look_at_two(from, came[r].word[0], came[r].word[1]);
                look_at_two(from + THREADS * 2, came[r].word[2], came[r].word[3]);
#pragma unroll
                for (int i = 0; i < 4; ++i) all_here &= (u32)(came[r].word[i] >> 32) == epoch;
            }
        } while (!all_here);
        float sums[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[i] = 0;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            Quad theirs;
#pragma unroll
            for (int i = 0; i < 4; ++i) theirs.x[i] = r == rank ? own.x[i] : (u32)came[r].word[i];
            add(sums, theirs);
        }
        data[vector] = pack(sums);
    } else if ((epoch & REFRESH) < 2) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) send(place(mine, epoch, r, most_blocks), Quad{}, stamp);
    }
    __syncthreads();  // all threads have read the epoch
    if (threadIdx.x == 0) epochs[blockIdx.x] = epoch + 1;
}
