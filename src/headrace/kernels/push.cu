// Writes a small message into another GPU's memory, then the counter that tells its owner so: one block.
//
// The copy engine does the same, but only after an event between two streams and a start of its own, some 10 us more.

typedef unsigned int u32;

struct alignas(16) Quad {
    u32 x, y, z, w;
};

extern "C" __global__ void __launch_bounds__(1024)
push(const Quad* source, Quad* target, u32* counter, u32 value, u32 num_words) {
    const u32 quads = num_words / 4;
    for (u32 i = threadIdx.x; i < quads; i += blockDim.x) target[i] = source[i];
    const u32 rest = 4 * quads + threadIdx.x;
    if (rest < num_words) ((u32*)target)[rest] = ((const u32*)source)[rest];
    // The barrier orders the block's writes before the fence, the fence orders them all before the counter for whoever
    // sees it from another device.
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
    }
}
