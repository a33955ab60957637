// The body of a kernel that `mx.fast.cuda_kernel` makes (service/engine/attention.py): a block of 512 threads computes MC queries
// of one row and one head of keys and values, over all of the row's keys or, where SPLIT, over every gridDim.y-th 512 of them.
// Constants: T (element type), D and V (dimensions of keys and values), G (query heads that share a head of keys), MC, WINDOW
// (0: none), SINKS, AHEAD (values that a warp loads at a time).
constexpr int THREADS = 512, W = THREADS / 32, P = MC + 4;
constexpr int VEC = 16 / sizeof(T), VPT = V / 32;
struct alignas((VPT & (VPT - 1)) ? sizeof(T) : sizeof(T) * VPT) Pack { T x[VPT]; };
const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
const int heads = keys_shape[1], capacity = keys_shape[2], N = queries_shape[2], M = G * N;
const int b = blockIdx.x / heads, h = blockIdx.x % heads, m0 = blockIdx.z * MC;
const int start = starts[b], total = start + N;
const float log2e = 1.4426950408889634f;

__shared__ alignas(16) float qs[MC * D];
__shared__ alignas(16) float ps[THREADS * P];
__shared__ float part[W * MC], top[MC], factor[MC], first[MC];

for (int i = tid; i < MC * D; i += THREADS) {
  const int m = m0 + i / D, n = m / G, g = m % G;
  qs[i] = m < M ? scale[0] * log2e * static_cast<float>(queries[((b * heads + h) * G + g) * N * D + n * D + i % D]) : 0.0f;
}
if (tid < MC) {
  const bool sinking = SINKS && blockIdx.y == 0 && m0 + tid < M;
  top[tid] = sinking ? log2e * static_cast<float>(sinks[h * G + (m0 + tid) % G]) : -INFINITY;
  first[tid] = sinking ? 1.0f : 0.0f;
}
__syncthreads();

float acc[MC][VPT], sum[MC];
#pragma unroll
for (int m = 0; m < MC; m++) {
  sum[m] = 0.0f;
  #pragma unroll
  for (int j = 0; j < VPT; j++) { acc[m][j] = 0.0f; }
}
const T* K = keys + (int64_t)(b * heads + h) * capacity * D;
const T* U = values + (int64_t)(b * heads + h) * capacity * V + lane * VPT;
const int begin = (WINDOW > 0 && start + 1 > WINDOW) ? (start + 1 - WINDOW) / THREADS : 0;

for (int tile = begin + blockIdx.y; tile * THREADS < total; tile += gridDim.y) {
  // One key a thread, scored for all queries.
  const int key = tile * THREADS + tid, count = min(THREADS, total - tile * THREADS);
  float s[MC];
  #pragma unroll
  for (int m = 0; m < MC; m++) { s[m] = 0.0f; }
  if (key < total) {
    const uint4* row = reinterpret_cast<const uint4*>(K + (int64_t)key * D);
    uint4 next = row[0];
    #pragma unroll 2
    for (int d = 0; d < D; d += VEC) {
      const uint4 now = next;
      if (d + VEC < D) { next = row[d / VEC + 1]; }
      const T* held = reinterpret_cast<const T*>(&now);
      #pragma unroll
      for (int j = 0; j < VEC; j += 4) {
        const float k0 = static_cast<float>(held[j]), k1 = static_cast<float>(held[j + 1]);
        const float k2 = static_cast<float>(held[j + 2]), k3 = static_cast<float>(held[j + 3]);
        #pragma unroll
        for (int m = 0; m < MC; m++) {
          const float4 q = *reinterpret_cast<const float4*>(&qs[m * D + d + j]);
          s[m] += q.x * k0 + q.y * k1 + q.z * k2 + q.w * k3;
        }
      }
    }
  }
  #pragma unroll
  for (int m = 0; m < MC; m++) {
    const int at = start + (m0 + m) / G;
    if (key > at || m0 + m >= M || (WINDOW > 0 && key + WINDOW <= at)) { s[m] = -INFINITY; }
    float most = s[m];
    #pragma unroll
    for (int o = 16; o > 0; o >>= 1) { most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, o)); }
    if (lane == 0) { part[warp * MC + m] = most; }
  }
  __syncthreads();
  if (tid < MC) {
    float now = top[tid];
    for (int w = 0; w < W; w++) { now = fmaxf(now, part[w * MC + tid]); }
    factor[tid] = top[tid] == -INFINITY ? 0.0f : exp2f(top[tid] - now);
    first[tid] *= factor[tid];
    top[tid] = now;
  }
  __syncthreads();
  #pragma unroll
  for (int m = 0; m < MC; m += 4) {
    float4 p;
    p.x = s[m] == -INFINITY ? 0.0f : exp2f(s[m] - top[m]);
    p.y = s[m + 1] == -INFINITY ? 0.0f : exp2f(s[m + 1] - top[m + 1]);
    p.z = s[m + 2] == -INFINITY ? 0.0f : exp2f(s[m + 2] - top[m + 2]);
    p.w = s[m + 3] == -INFINITY ? 0.0f : exp2f(s[m + 3] - top[m + 3]);
    *reinterpret_cast<float4*>(&ps[tid * P + m]) = p;
  }
  #pragma unroll
  for (int m = 0; m < MC; m++) {
    sum[m] *= factor[m];
    #pragma unroll
    for (int j = 0; j < VPT; j++) { acc[m][j] *= factor[m]; }
  }
  __syncthreads();
  // Each warp weighs every sixteenth value, of which it loads several at a time.
  #pragma unroll 1
  for (int i0 = warp; i0 < count; i0 += W * AHEAD) {
    Pack v[AHEAD];
    #pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int i = tile * THREADS + min(i0 + u * W, count - 1);
      v[u] = *reinterpret_cast<const Pack*>(U + (int64_t)i * V);
    }
    #pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (i0 + u * W < count) {
        #pragma unroll
        for (int m = 0; m < MC; m += 4) {
          const float4 p = *reinterpret_cast<const float4*>(&ps[(i0 + u * W) * P + m]);
          sum[m] += p.x; sum[m + 1] += p.y; sum[m + 2] += p.z; sum[m + 3] += p.w;
          #pragma unroll
          for (int j = 0; j < VPT; j++) {
            const float value = static_cast<float>(v[u].x[j]);
            acc[m][j] += p.x * value; acc[m + 1][j] += p.y * value;
            acc[m + 2][j] += p.z * value; acc[m + 3][j] += p.w * value;
          }
        }
      }
    }
  }
  __syncthreads();
}
// The warps' shares, added in their order, so that the same call always gives the same bits.
for (int w = 0; w < W; w++) {
  if (warp == w) {
    #pragma unroll
    for (int m = 0; m < MC; m++) {
      #pragma unroll
      for (int j = 0; j < VPT; j++) {
        float* at = &ps[m * V + lane * VPT + j];
        *at = w ? *at + acc[m][j] : acc[m][j];
      }
      if (lane == 0) { part[m] = w ? part[m] + sum[m] : sum[m] + first[m]; }
    }
  }
  __syncthreads();
}
for (int i = tid; i < MC * V; i += THREADS) {
  const int m = m0 + i / V, n = m / G, head = h * G + m % G;
  if (m < M) {
    const int64_t row = ((int64_t)b * N + n) * heads * G + head;
#if SPLIT
    out[(row * gridDim.y + blockIdx.y) * V + i % V] = ps[i];
    if (i % V == 0) {
      sums[row * gridDim.y + blockIdx.y] = part[i / V];
      tops[row * gridDim.y + blockIdx.y] = top[i / V];
    }
#else
    out[row * V + i % V] = static_cast<T>(part[i / V] > 0.0f ? ps[i] / part[i / V] : 0.0f);
#endif
  }
}
