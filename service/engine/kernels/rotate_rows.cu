// A block a row, token and head: rotates a head of queries, or rotates a head of new keys and writes it with its values behind the
// row's own, in place. `written` is for the calls that read them, which run after the kernel because they have it as an input.
// Constants: T (bfloat16 or float16), PERIODS (`frequencies` holds a period for each pair; else log2 of their base).
const int N = queries_shape[1], Q = queries_shape[2], half = queries_shape[3] / 2, V = new_values_shape[3];
const int heads = Q + new_keys_shape[2], token = blockIdx.x / heads % N, row = blockIdx.x / (heads * N);
const int head = blockIdx.x % heads, of = head - Q;
const int position = starts[row] + token;
const T* from = queries + row * queries_strides[0] + token * queries_strides[1] + head * queries_strides[2];
int64_t step = queries_strides[3], pitch = 1;
T* to = rotated + (((int64_t)row * N + token) * Q + head) * 2 * half;
if (of >= 0) {
  from = new_keys + row * new_keys_strides[0] + token * new_keys_strides[1] + of * new_keys_strides[2];
  step = new_keys_strides[3];
  pitch = keys_strides[3];
  to = const_cast<T*>(keys) + row * keys_strides[0] + of * keys_strides[1] + position * keys_strides[2];
}
for (int i = threadIdx.x; i < half; i += blockDim.x) {
  const float frequency = PERIODS ? 1.0f / frequencies[i] : exp2f(-(static_cast<float>(i) / half) * frequencies[0]);
  const float angle = static_cast<float>(position) * frequency, cosine = cosf(angle), sine = sinf(angle);
  const float lower = static_cast<float>(from[i * step]), upper = static_cast<float>(from[(i + half) * step]);
  to[i * pitch] = static_cast<T>(lower * cosine - upper * sine);
  to[(i + half) * pitch] = static_cast<T>(lower * sine + upper * cosine);
}
if (of >= 0) {
  T* value = const_cast<T*>(values) + row * values_strides[0] + of * values_strides[1] + position * values_strides[2];
  const T* new_value = new_values + row * new_values_strides[0] + token * new_values_strides[1] + of * new_values_strides[2];
  for (int i = threadIdx.x; i < V; i += blockDim.x) { value[i * values_strides[3]] = new_value[i * new_values_strides[3]]; }
}
if (blockIdx.x == 0 && threadIdx.x == 0) { written[0] = 1; }
