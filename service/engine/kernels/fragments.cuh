// Shared by the kernels of this folder: loads, copies to shared memory, tensor core products of fragments, rounding.
template <int N, typename Word, typename T>
__device__ __forceinline__ void load(Word (&to)[N], const T* from) {
  // Uses the widest words that the length allows. A row of keys or values is aligned to its length.
  constexpr int BYTES = N * sizeof(Word);
  if constexpr (BYTES % 16 == 0) {
    #pragma unroll
    for (int i = 0; i < BYTES / 16; i++) { reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i]; }
  } else if constexpr (BYTES % 8 == 0) {
    #pragma unroll
    for (int i = 0; i < BYTES / 8; i++) { reinterpret_cast<uint2*>(to)[i] = reinterpret_cast<const uint2*>(from)[i]; }
  } else {
    #pragma unroll
    for (int i = 0; i < BYTES / 4; i++) { reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i]; }
  }
}

template <bool HALF>
__device__ __forceinline__ void multiply(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (HALF) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ void rescale(float (&c)[4], float upper, float lower) {
  // Scales the two rows of a product that a thread holds by separate factors.
  c[0] *= upper;
  c[1] *= upper;
  c[2] *= lower;
  c[3] *= lower;
}

template <bool HALF>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  // The lower half of the register holds the element with the lower index.
  uint32_t both;
  if constexpr (HALF) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

template <bool HALF>
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  // Two elements each.
  uint32_t both;
  if constexpr (HALF) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
  }
  return both;
}

template <bool HALF>
__device__ __forceinline__ void widen(uint32_t (&to)[4], uint32_t word, uint32_t scale, uint32_t bias) {
  // Eight 4-bit numbers: elements 0 and 4, 1 and 5, 2 and 6, 3 and 7. They are set as the lowest bits of a number whose last place
  // is 1 (128 or 1024), which is then subtracted exactly.
  constexpr uint32_t ONES = HALF ? 0x3C003C00 : 0x3F803F80, ADDED = HALF ? 0x64006400 : 0x43004300;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t number = multiply_add<HALF>(word >> 4 * i & 0x000F000F | ADDED, ONES, ADDED | 0x80008000);
    to[i] = multiply_add<HALF>(number, scale, bias);
  }
}

template <bool ONCE>
__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
  // To shared memory. ONCE: no other block reads it, but the rest of its 256 bytes is needed.
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (ONCE) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
  }
}

__device__ __forceinline__ void copy_async(uint32_t* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void copy_async_wait() {
  // Waits until all but the LEFT newest groups have arrived.
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
