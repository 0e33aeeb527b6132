// Attention of one decode step over a paged KV cache, blocks read where they lie.
//
// A segment is a run of blocks read once for a set of rows. One threadgroup of 8 SIMD groups
// handles one segment and one kv head; the result per row and query head is partial:
//     m = max of the scores, l = sum of 2^(score - m), acc = sum of 2^(score - m) * value
// (scores in the log2 domain, everything in float). merge_partials combines a row's partials.
//
//   attend_row:  one row. Each SIMD group takes 16 tokens in turn and reads K and V straight into
//                registers, for all query heads of the group; the 8 partial states meet at the end.
//   attend_rows: many rows. K and V tiles in threadgroup memory; each SIMD group has queries of
//                its own and goes through all tokens of the tile.
//
// Lanes share a token's head dim for the products with K and V. For the softmax in between they
// hold one score each: 32 = queries x tokens of a step, lane = query * tokens + token.
//
// Layouts: keys, values [blocks, kv heads, block size, D]; queries [rows, kv heads, group, D];
// block_tables [rows, width]; segments [n, 5]: table row, first token, tokens, first member,
// members; members [n, 2]: row, partial; acc [partials, kv heads, group, D]; stats the same with
// (m, l) instead of D.

constant constexpr int SIMDS = 8;
constant constexpr int THREADS = 256;
constant constexpr int TOKENS_PER_TURN = 16;  // of one SIMD group in attend_row
constant constexpr float LOWEST = -1e30f;     // finite: differences of two are never NaN

// ---- a head dim over 32 lanes: elements per load, loads, elements per lane ---------------------

template <int D>
constexpr int width() {
  return D == 64 ? 2 : 4;
}
template <int D>
constexpr int chunks() {
  return (D + 32 * width<D>() - 1) / (32 * width<D>());
}
template <int D>
constexpr int per_lane() {
  return width<D>() * chunks<D>();
}

// Tokens per step: the scores of all queries (rounded up to a power of two) fill the lanes once.
template <int Q>
constexpr int step_tokens() {
  return Q <= 2 ? 16 : Q <= 4 ? 8 : Q <= 8 ? 4 : 2;
}

// The lane's part of a row of D elements; lanes past its end get zeros.
template <int D, typename T, typename To>
METAL_FUNC void load_part(const device T* row, uint lane, thread To* part) {
  using Vector = vec<T, width<D>()>;
#pragma unroll
  for (int c = 0; c < chunks<D>(); c++) {
    uint d = (c * 32 + lane) * width<D>();
    Vector x = Vector(T(0));
    if (d < D) x = *(const device Vector*)(row + d);
#pragma unroll
    for (int i = 0; i < width<D>(); i++) part[c * width<D>() + i] = To(x[i]);
  }
}
template <int D, typename T, typename To>
METAL_FUNC void load_part(const threadgroup T* row, uint lane, thread To* part) {
  using Vector = vec<T, width<D>()>;
#pragma unroll
  for (int c = 0; c < chunks<D>(); c++) {
    uint d = (c * 32 + lane) * width<D>();
    Vector x = Vector(T(0));
    if (d < D) x = *(const threadgroup Vector*)(row + d);
#pragma unroll
    for (int i = 0; i < width<D>(); i++) part[c * width<D>() + i] = To(x[i]);
  }
}
template <int D, typename T>
METAL_FUNC void store_part(device T* row, uint lane, const thread float* part) {
  using Vector = vec<T, width<D>()>;
#pragma unroll
  for (int c = 0; c < chunks<D>(); c++) {
    uint d = (c * 32 + lane) * width<D>();
    Vector x = Vector(T(0));
#pragma unroll
    for (int i = 0; i < width<D>(); i++) x[i] = T(part[c * width<D>() + i]);
    if (d < D) *(device Vector*)(row + d) = x;
  }
}
template <int D>
METAL_FUNC void store_part(threadgroup float* row, uint lane, const thread float* part) {
  using Vector = vec<float, width<D>()>;
#pragma unroll
  for (int c = 0; c < chunks<D>(); c++) {
    uint d = (c * 32 + lane) * width<D>();
    Vector x = Vector(0.0f);
#pragma unroll
    for (int i = 0; i < width<D>(); i++) x[i] = part[c * width<D>() + i];
    if (d < D) *(threadgroup Vector*)(row + d) = x;
  }
}

// Where a token's K or V row starts in the pool, in elements. CONTIGUOUS is for comparison only:
// one block per row, found without a table.
template <int D>
METAL_FUNC uint row_offset(
    const device int* block_tables, uint table_row, uint table_width, uint token, uint block_size,
    uint kv_heads, uint head) {
#ifdef CONTIGUOUS
  uint block = table_row;
#else
  uint block = uint(block_tables[table_row * table_width + token / block_size]);
#endif
  return ((block * kv_heads + head) * block_size + token % block_size) * D;
}

// ---- rows of K and V for the tokens of one step ------------------------------------------------

template <typename T>
struct PoolRows {  // in the pool; `offset` belongs to this lane's token, the step starts at `first`
  const device T* keys;
  const device T* values;
  uint offset;
  uint first;
  METAL_FUNC const device T* key(int t) const { return keys + simd_broadcast(offset, ushort(first + t)); }
  METAL_FUNC const device T* value(int t) const { return values + simd_broadcast(offset, ushort(first + t)); }
};
template <typename T, int D>
struct TileRows {  // in threadgroup memory
  const threadgroup T* keys;
  const threadgroup T* values;
  METAL_FUNC const threadgroup T* key(int t) const { return keys + t * D; }
  METAL_FUNC const threadgroup T* value(int t) const { return values + t * D; }
};

// ---- the running softmax of Q queries ----------------------------------------------------------

template <int D, int Q>
struct State {
  float acc[Q][per_lane<D>()];
  float m;  // of query lane / step_tokens, the same in all its lanes
  float l;  // this lane's share; the query's lanes together have the sum
};

template <int D, int Q>
METAL_FUNC void clear(thread State<D, Q>& state) {
  state.m = LOWEST;
  state.l = 0.0f;
#pragma unroll
  for (int q = 0; q < Q; q++) {
#pragma unroll
    for (int i = 0; i < per_lane<D>(); i++) state.acc[q][i] = 0.0f;
  }
}

// Sums 32 values over 32 lanes: lane i gets the sum of x[i]. 31 exchanges, not 160: each halves
// the values that a lane still has to sum.
template <int N>
METAL_FUNC void halve(thread float* x, uint lane) {
  const bool upper = lane & N;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float low = x[i], high = x[i + N];  // by value: x has to stay in registers
    x[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, ushort(N));
  }
}
METAL_FUNC float sum_each(thread float* x, uint lane) {
  halve<16>(x, lane);
  halve<8>(x, lane);
  halve<4>(x, lane);
  halve<2>(x, lane);
  halve<1>(x, lane);
  return x[0];
}

// One step: `valid` tokens (rows past them are not read) for the first `queries` of Q.
template <int D, int Q, typename T, typename Rows>
METAL_FUNC void attend(
    thread State<D, Q>& state, const thread T* q, Rows rows, int valid, int queries, float scale,
    uint lane) {
  constexpr int N = per_lane<D>();
  constexpr int S = step_tokens<Q>();
  float scores[32];
#pragma unroll
  for (int t = 0; t < S; t++) {
    auto row = rows.key(t);
    float k[N] = {};
    if (t < valid) load_part<D>(row, lane, k);
#pragma unroll
    for (int j = 0; j < 32 / S; j++) {
      float dot = 0.0f;
      if (j < Q && j < queries) {
#pragma unroll
        for (int i = 0; i < N; i++) dot += float(q[j * N + i]) * k[i];
      }
      scores[j * S + t] = dot;
    }
  }
  bool counts = int(lane % S) < valid && int(lane / S) < queries;
  float score = sum_each(scores, lane) * scale;
  float best = counts ? score : LOWEST;
#pragma unroll
  for (int n = S / 2; n > 0; n /= 2) best = max(best, simd_shuffle_xor(best, ushort(n)));
  float m = max(state.m, best);
  float p = counts ? exp2(score - m) : 0.0f;
  float rescale = exp2(state.m - m);
  state.l = state.l * rescale + p;
  state.m = m;
#pragma unroll
  for (int j = 0; j < Q; j++) {
    if (j < queries) {
      float r = simd_shuffle(rescale, ushort(j * S));
#pragma unroll
      for (int i = 0; i < N; i++) state.acc[j][i] *= r;
    }
  }
#pragma unroll
  for (int t = 0; t < S; t++) {
    auto row = rows.value(t);
    float v[N] = {};
    if (t < valid) load_part<D>(row, lane, v);
#pragma unroll
    for (int j = 0; j < Q; j++) {
      if (j < queries) {
        float w = simd_shuffle(p, ushort(j * S + t));
#pragma unroll
        for (int i = 0; i < N; i++) state.acc[j][i] += w * v[i];
      }
    }
  }
}

// The sum of l over a query's lanes, in each of them.
template <int S>
METAL_FUNC float whole_sum(float l) {
#pragma unroll
  for (int n = S / 2; n > 0; n /= 2) l += simd_shuffle_xor(l, ushort(n));
  return l;
}

// ---- one row per segment -----------------------------------------------------------------------

template <typename T, int D, int G>
METAL_FUNC void attend_row(
    const device T* queries, const device T* keys, const device T* values,
    const device int* block_tables, const device int* segments, const device int* members,
    uint table_width, uint block_size, float scale, device float* acc, device float* stats,
    threadgroup T* query_tile, threadgroup float* parts, threadgroup float* maxima,
    threadgroup float* sums, uint3 group, uint3 groups, uint thread_index, uint simd, uint lane) {
  constexpr int N = per_lane<D>();
  constexpr int S = step_tokens<G>();
  constexpr int TOGETHER = THREADS / D > 0 ? THREADS / D : 1;  // queries that meet at a time
  const uint head = group.y, kv_heads = groups.y;
  const int field = lane < 5 ? segments[group.x * 5 + lane] : 0;
  const uint table_row = simd_broadcast(field, 0);
  const uint first = simd_broadcast(field, 1);
  const int tokens = simd_broadcast(field, 2);
  const uint member = simd_broadcast(field, 3);
  const int pair = lane < 2 ? members[member * 2 + lane] : 0;
  const uint row = simd_broadcast(pair, 0);
  const uint partial = simd_broadcast(pair, 1);

  const device T* my_queries = queries + (row * kv_heads + head) * G * D;
  for (uint i = thread_index * 4; i < G * D; i += THREADS * 4)
    *(threadgroup vec<T, 4>*)(query_tile + i) = *(const device vec<T, 4>*)(my_queries + i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  T q[G * N];
#pragma unroll
  for (int j = 0; j < G; j++) load_part<D>(query_tile + j * D, lane, q + j * N);

  State<D, G> state;
  clear(state);
  for (int turn = simd * TOKENS_PER_TURN; turn < tokens; turn += SIMDS * TOKENS_PER_TURN) {
    const int here = min(TOKENS_PER_TURN, tokens - turn);
    uint offset = 0;
    if (int(lane) < here)
      offset = row_offset<D>(
          block_tables, table_row, table_width, first + turn + lane, block_size, kv_heads, head);
    for (int t = 0; t < here; t += S) {
      PoolRows<T> rows = {keys, values, offset, uint(t)};
      attend<D, G>(state, q, rows, here - t, G, scale, lane);
    }
  }

  const float l = whole_sum<S>(state.l);
  if (lane % S == 0 && lane / S < G) {
    maxima[simd * G + lane / S] = state.m;
    sums[simd * G + lane / S] = l;
  }
  const uint base = (partial * kv_heads + head) * G;
#pragma unroll
  for (int j = 0; j < G; j++) {
    const int slot = j % TOGETHER;
    store_part<D>(parts + (simd * TOGETHER + slot) * D, lane, state.acc[j]);
    if (slot == TOGETHER - 1 || j == G - 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = thread_index; i < uint(slot + 1) * D; i += THREADS) {
        const uint query = j - slot + i / D;
        float m = LOWEST;
        for (int s = 0; s < SIMDS; s++) m = max(m, maxima[s * G + query]);
        float sum = 0.0f, a = 0.0f;
        for (int s = 0; s < SIMDS; s++) {
          const float weight = exp2(maxima[s * G + query] - m);
          sum += weight * sums[s * G + query];
          a += weight * parts[s * TOGETHER * D + i];
        }
        acc[(base + query) * D + i % D] = a;
        if (i % D == 0) {
          stats[(base + query) * 2] = m;
          stats[(base + query) * 2 + 1] = sum;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// ---- many rows per segment ---------------------------------------------------------------------

// Queries of all rows count as one list (row by row, head by head), dealt to SIMD groups in turn;
// Q per SIMD group stay in registers. A longer list is worked off in parts for each tile, with the
// state kept in acc and stats meanwhile: K and V are still read once.
template <typename T, int D, int G, int Q, int TILE>
METAL_FUNC void attend_rows(
    const device T* queries, const device T* keys, const device T* values,
    const device int* block_tables, const device int* segments, const device int* members,
    uint table_width, uint block_size, float scale, device float* acc, device float* stats,
    threadgroup T* key_tile, threadgroup T* value_tile, threadgroup uint* offsets, uint3 group,
    uint3 groups, uint thread_index, uint simd, uint lane) {
  constexpr int N = per_lane<D>();
  constexpr int S = step_tokens<Q>();
  constexpr int V = D / 4;  // vectors in a row
  const uint head = group.y, kv_heads = groups.y;
  const int field = lane < 5 ? segments[group.x * 5 + lane] : 0;
  const uint table_row = simd_broadcast(field, 0);
  const uint first = simd_broadcast(field, 1);
  const int tokens = simd_broadcast(field, 2);
  const uint member = simd_broadcast(field, 3);
  const int total = simd_broadcast(field, 4) * G;
  const bool in_registers = total <= SIMDS * Q;

  T q[Q * N];
  State<D, Q> state;
  for (int tile = 0; tile == 0 || tile < tokens; tile += TILE) {
    const int here = min(TILE, tokens - tile);
    if (int(thread_index) < here)
      offsets[thread_index] = row_offset<D>(
          block_tables, table_row, table_width, first + tile + thread_index, block_size, kv_heads,
          head);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // and the last tile has been used
    for (int i = thread_index; i < here * V; i += THREADS) {
      const uint from = offsets[i / V] + i % V * 4;
      *(threadgroup vec<T, 4>*)(key_tile + i * 4) = *(const device vec<T, 4>*)(keys + from);
      *(threadgroup vec<T, 4>*)(value_tile + i * 4) = *(const device vec<T, 4>*)(values + from);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int part = 0; part < total; part += SIMDS * Q) {
      const int mine = clamp((total - part - int(simd) + SIMDS - 1) / SIMDS, 0, Q);
      // The lane that keeps the statistics of a query, and where they go.
      const int slot = lane / S;
      const bool keeper = lane % S == 0 && slot < mine;
      uint place = 0;
      if (slot < mine) {
        const uint number = part + slot * SIMDS + simd;
        const uint partial = members[(member + number / G) * 2 + 1];
        place = (partial * kv_heads + head) * G + number % G;
      }
      if (tile == 0 || !in_registers) {
        clear(state);
#pragma unroll
        for (int j = 0; j < Q; j++) {
          if (j < mine) {
            const uint number = part + j * SIMDS + simd;
            const uint row = members[(member + number / G) * 2];
            const uint from = ((row * kv_heads + head) * G + number % G) * D;
            load_part<D>(queries + from, lane, q + j * N);
          }
        }
      }
      if (tile > 0 && !in_registers) {
        if (keeper) {
          state.m = stats[place * 2];
          state.l = stats[place * 2 + 1];
        }
        state.m = simd_shuffle(state.m, ushort(slot * S));
#pragma unroll
        for (int j = 0; j < Q; j++) {
          const uint at = simd_shuffle(place, ushort(j * S));
          if (j < mine) load_part<D>(acc + at * D, lane, state.acc[j]);
        }
      }
      for (int t = 0; t < here; t += S) {
        TileRows<T, D> rows = {key_tile + t * D, value_tile + t * D};
        attend<D, Q>(state, q, rows, here - t, mine, scale, lane);
      }
      if (tile + TILE >= tokens || !in_registers) {
        const float l = whole_sum<S>(state.l);
        if (keeper) {
          stats[place * 2] = state.m;
          stats[place * 2 + 1] = l;
        }
#pragma unroll
        for (int j = 0; j < Q; j++) {
          const uint at = simd_shuffle(place, ushort(j * S));
          if (j < mine) store_part<D>(acc + at * D, lane, state.acc[j]);
        }
      }
    }
  }
}

// ---- the merge ---------------------------------------------------------------------------------

template <int D>
METAL_FUNC float merge_range(
    const device float* acc, const device float* stats, int first, int last, uint heads, uint head,
    float m, uint lane, thread float* result) {
  constexpr int N = per_lane<D>();
  float sum = 0.0f;
  for (int base = first; base < last; base += 32) {
    const int here = min(32, last - base);
    float weight = 0.0f;
    if (int(lane) < here) {
      const uint place = (base + lane) * heads + head;
      weight = exp2(stats[place * 2] - m);
      sum += weight * stats[place * 2 + 1];
    }
    for (int i = 0; i < here; i++) {
      const float w = simd_broadcast(weight, ushort(i));
      float part[N];
      load_part<D>(acc + ((base + i) * heads + head) * D, lane, part);
#pragma unroll
      for (int n = 0; n < N; n++) result[n] += w * part[n];
    }
  }
  return sum;
}

// One SIMD group per row and head: partials of shared segments and of the row's own.
template <typename T, int D>
METAL_FUNC void merge_partials(
    const device float* shared_acc, const device float* shared_stats,
    const device int* shared_starts, const device float* own_acc, const device float* own_stats,
    const device int* own_starts, uint heads, device T* out, uint pair, uint lane) {
  constexpr int N = per_lane<D>();
  const uint row = pair / heads, head = pair % heads;
  const int shared_first = shared_starts[row], shared_last = shared_starts[row + 1];
  const int own_first = own_starts[row], own_last = own_starts[row + 1];
  float m = LOWEST;
  for (int i = shared_first + lane; i < shared_last; i += 32)
    m = max(m, shared_stats[(i * heads + head) * 2]);
  for (int i = own_first + lane; i < own_last; i += 32)
    m = max(m, own_stats[(i * heads + head) * 2]);
  m = simd_max(m);
  float result[N] = {};
  float sum =
      merge_range<D>(shared_acc, shared_stats, shared_first, shared_last, heads, head, m, lane,
                     result) +
      merge_range<D>(own_acc, own_stats, own_first, own_last, heads, head, m, lane, result);
  sum = simd_sum(sum);
  const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++) result[i] *= scale;
  store_part<D>(out + (row * heads + head) * D, lane, result);
}
