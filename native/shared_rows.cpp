// What ranks that share tables do with rows, but for finding the distinct ones (batch_update.cpp); contract in
// hotrow/embedding.h. Compiled once, for the baseline.
#include <hotrow/cut.h>
#include <hotrow/embedding.h>
#include <hotrow/parallel.h>

#include <cstring>

namespace hotrow {
namespace {

constexpr int64_t kRowsAhead = 16;  // each row is one or more random reads
constexpr int64_t kLineBytes = 64;

void copy(const RowCopy& what, int64_t first, int64_t last) {
  const size_t bytes = static_cast<size_t>(what.row_bytes);
  std::byte* to = what.to + first * what.row_bytes;
  if (!what.rows) {
    if (last > first) std::memcpy(to, what.from + first * what.row_bytes, static_cast<size_t>(last - first) * bytes);
    return;
  }
  for (int64_t i = first; i < last; ++i, to += bytes) {
    if (i + kRowsAhead < last) {
      const std::byte* ahead = what.from + what.rows[i + kRowsAhead] * what.row_bytes;
      for (int64_t at = 0; at < what.row_bytes; at += kLineBytes) __builtin_prefetch(ahead + at);
    }
    std::memcpy(to, what.from + what.rows[i] * what.row_bytes, bytes);
  }
}

}  // namespace

void rows_by_home(const std::vector<const int64_t*>& row_of, const std::vector<int64_t>& counts, const int64_t* slots,
                  const std::vector<int64_t>& first_keys, const Shares& shares, RowsByHome& out) {
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  const auto array = [&] { return std::make_unique<KeptPages>(static_cast<size_t>(total) * sizeof(int64_t)); };
  const auto numbers = [](const auto& pages) { return reinterpret_cast<int64_t*>(pages->bytes()); };
  const std::unique_ptr<KeptPages> all_homes = array(), all_keys = array();
  int64_t *homes = numbers(all_homes), *keys = numbers(all_keys);
  out.counts.assign(static_cast<size_t>(shares.num_ranks), 0);
  for (size_t t = 0, i = 0; t < counts.size(); ++t) {
    for (int64_t k = 0; k < counts[t]; ++k, ++i) {
      const int64_t row = row_of[t][slots[i]];
      const Shares::Place lies = shares.place_of(t, row);
      homes[i] = lies.rank < 0 ? row % shares.num_ranks : lies.rank;
      keys[i] = first_keys[t] + lies.local;
      ++out.counts[static_cast<size_t>(homes[i])];
    }
  }
  out.keys = array();
  out.places = array();
  std::vector<int64_t> next(out.counts.size());
  for (size_t r = 1; r < next.size(); ++r) next[r] = next[r - 1] + out.counts[r - 1];
  for (int64_t i = 0; i < total; ++i) {
    const int64_t at = next[static_cast<size_t>(homes[i])]++;
    numbers(out.keys)[at] = keys[i];
    numbers(out.places)[at] = i;
  }
}

void copy_rows(const std::vector<RowCopy>& copies, int num_threads) {
  int64_t total = 0;
  for (const RowCopy& each : copies) total += each.count * each.row_bytes;
  num_threads = team(total, num_threads);
  const int64_t piece_bytes = task_bytes(total, num_threads);
  std::vector<Range> ranges;
  for (size_t c = 0; c < copies.size(); ++c) {
    const int64_t count = copies[c].count, pieces = num_pieces(count * copies[c].row_bytes, piece_bytes);
    for (int64_t k = 0; k < pieces; ++k) ranges.push_back({c, count * k / pieces, count * (k + 1) / pieces});
  }
  parallel_for(static_cast<int64_t>(ranges.size()), num_threads, [&](int64_t task, int) {
    const Range& range = ranges[static_cast<size_t>(task)];
    copy(copies[range.owner], range.first, range.last);
  });
}

}  // namespace hotrow
