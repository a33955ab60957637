// Writes new keys and values in place to each row's positions. One block per row, head and token. Calls that read them take
// `written` as an input, so they run after this kernel.
const int N = new_keys_shape[2], H = new_keys_shape[1], D = new_keys_shape[3], V = new_values_shape[3], W = page_table_shape[1];
const int token = blockIdx.x % N, head = blockIdx.x / N % H, row = blockIdx.x / (N * H);
const int position = starts[row] + token;
const int64_t page = page_table[row * W + min(position / PAGE, W - 1)], slot = position % PAGE;
T* key = const_cast<T*>(keys) + page * keys_strides[0] + head * keys_strides[1] + slot * keys_strides[2];
T* value = const_cast<T*>(values) + page * values_strides[0] + head * values_strides[1] + slot * values_strides[2];
const auto* new_key = new_keys + row * new_keys_strides[0] + head * new_keys_strides[1] + token * new_keys_strides[2];
const auto* new_value = new_values + row * new_values_strides[0] + head * new_values_strides[1] + token * new_values_strides[2];
for (int i = threadIdx.x; i < D; i += blockDim.x) { key[i] = static_cast<T>(new_key[i * new_keys_strides[3]]); }
for (int i = threadIdx.x; i < V; i += blockDim.x) { value[i] = static_cast<T>(new_value[i * new_values_strides[3]]); }
if (blockIdx.x == 0 && threadIdx.x == 0) { written[0] = 1; }
