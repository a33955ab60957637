// Copies each row's consecutive positions from its pages, with zeros from its end on and for page 0, which belongs to no row. One
// block per row, head and page.
const int H = pool_shape[1], D = pool_shape[3], W = page_table_shape[1], pages = gridDim.x / H;
const int place = blockIdx.x % pages, head = blockIdx.x / pages, row = blockIdx.y;
const int64_t page = page_table[row * W + min(place, W - 1)];
const T* from = pool + page * pool_strides[0] + head * pool_strides[1];
T* to = out + (((int64_t)row * H + head) * pages + place) * PAGE * D;
const int held = page == 0 ? 0 : ends[row] - place * PAGE;
for (int i = threadIdx.x; i < PAGE * D; i += blockDim.x) {
  to[i] = i / D < held ? from[i / D * pool_strides[2] + i % D] : static_cast<T>(0.0f);
}
