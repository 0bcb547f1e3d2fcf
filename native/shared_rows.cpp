// Packing and unpacking of rows and sums for ranks that share tables; distinct rows are found in batch_update.cpp;
// contract in hotrow/embedding.h. Compiled once, for the baseline.
#include <hotrow/cut.h>
#include <hotrow/embedding.h>
#include <hotrow/parallel.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

namespace hotrow {
namespace {

constexpr int64_t kRowsAhead = 16;  // each row is one or more random reads
constexpr int64_t kLineBytes = 64;
constexpr int64_t kLargeGap = 0xFFFF;  // stands for a gap that does not fit in 16 bits

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

// The rows of a node that go into one message, in the order of their keys.
struct Chosen {
  std::vector<int64_t> keys, rows;  // rows: their numbers among the sums of their table
  std::vector<int64_t> counts;      // by table
};

// Keys rise from table to table; within one they may not, if several batches have slots.
void sort_keys(Chosen& chosen) {
  size_t first = 0;
  for (const int64_t count : chosen.counts) {
    const size_t last = first + static_cast<size_t>(count);
    const auto begin = chosen.keys.begin();
    if (!std::is_sorted(begin + first, begin + last)) {
      std::vector<std::pair<int64_t, int64_t>> both;
      for (size_t i = first; i < last; ++i) both.emplace_back(chosen.keys[i], chosen.rows[i]);
      std::sort(both.begin(), both.end());
      for (size_t i = first; i < last; ++i) std::tie(chosen.keys[i], chosen.rows[i]) = both[i - first];
    }
    first = last;
  }
}

std::vector<Chosen> chosen_of(const NodeSums& node, const Homes* homes, const std::vector<int64_t>& first_keys) {
  const size_t num_messages = homes ? static_cast<size_t>(homes->shares.num_ranks) : 1;
  std::vector<Chosen> found(num_messages);
  int64_t total = 0;
  for (const int64_t count : node.counts) total += count;
  for (Chosen& each : found) {
    each.keys.reserve(static_cast<size_t>(total) / num_messages * 5 / 4 + 1);
    each.rows.reserve(each.keys.capacity());
    each.counts.assign(node.counts.size(), 0);
  }
  const int64_t* rows = node.rows;
  for (size_t t = 0; t < node.counts.size(); ++t) {
    for (int64_t i = 0; i < node.counts[t]; ++i, ++rows) {
      int64_t home = 0, local = *rows;
      if (homes) {
        const int64_t row = homes->row_of[t][*rows];
        const Shares::Place lies = homes->shares.place_of(t, row);
        home = lies.rank < 0 ? row % homes->shares.num_ranks : lies.rank;
        local = lies.local;
      }
      Chosen& to = found[static_cast<size_t>(home)];
      to.keys.push_back(first_keys[t] + local);
      to.rows.push_back(i);
      ++to.counts[t];
    }
  }
  for (Chosen& each : found) sort_keys(each);
  return found;
}

int64_t num_large(const std::vector<int64_t>& keys) {
  int64_t found = 0, last = 0;
  for (const int64_t key : keys) {
    found += key - last >= kLargeGap;
    last = key;
  }
  return found;
}

// Words of the keys of a node: two numbers, the large gaps, the gaps.
int64_t key_words(int64_t num_keys, int64_t large) { return 2 + 2 * large + (num_keys + 1) / 2; }

int32_t* write_keys(const std::vector<int64_t>& keys, int32_t* out) {
  const int64_t large = num_large(keys), num = static_cast<int64_t>(keys.size());
  out[0] = static_cast<int32_t>(num);
  out[1] = static_cast<int32_t>(large);
  int32_t *next_large = out + 2, *small = out + 2 + 2 * large;
  auto* gaps = reinterpret_cast<uint16_t*>(small);
  if (num % 2) gaps[num] = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < num; ++i) {
    const int64_t gap = keys[static_cast<size_t>(i)] - last;
    last = keys[static_cast<size_t>(i)];
    gaps[i] = static_cast<uint16_t>(std::min(gap, kLargeGap));
    if (gap >= kLargeGap) {
      std::memcpy(next_large, &gap, sizeof gap);
      next_large += 2;
    }
  }
  return small + (num + 1) / 2;
}

// Reads what write_keys wrote; null if the words are malformed or a key is not below `end`.
const int32_t* read_keys(const int32_t* words, int64_t num_words, int64_t end, std::vector<int64_t>& keys) {
  if (num_words < 2) return nullptr;
  const int64_t num = words[0], large = words[1];
  if (num < 0 || large < 0 || large > num || key_words(num, large) > num_words) return nullptr;
  const int32_t *next_large = words + 2, *small = words + 2 + 2 * large;
  const auto* gaps = reinterpret_cast<const uint16_t*>(small);
  keys.resize(static_cast<size_t>(num));
  int64_t last = 0;
  for (int64_t i = 0; i < num; ++i) {
    int64_t gap = gaps[i];
    if (gap == kLargeGap) {
      if (next_large == small) return nullptr;
      std::memcpy(&gap, next_large, sizeof gap);
      next_large += 2;
    }
    if (gap < 0 || gap >= end - last) return nullptr;
    keys[static_cast<size_t>(i)] = last += gap;
  }
  return small + (num + 1) / 2;
}

}  // namespace

std::vector<SumsMessage> pack_sums(const std::vector<NodeSums>& nodes, const Homes* homes,
                                   const std::vector<int64_t>& first_keys, const std::vector<int64_t>& dims,
                                   int num_threads) {
  const size_t num_tables = dims.size();
  std::vector<std::vector<Chosen>> chosen;  // by node and message
  for (const NodeSums& node : nodes) chosen.push_back(chosen_of(node, homes, first_keys));
  std::vector<SumsMessage> messages(homes ? static_cast<size_t>(homes->shares.num_ranks) : 1);
  std::vector<RowCopy> copies;
  for (size_t m = 0; m < messages.size(); ++m) {
    int64_t heads = 0, floats = 0;
    for (const auto& of_node : chosen) {
      const Chosen& own = of_node[m];
      heads += key_words(static_cast<int64_t>(own.keys.size()), num_large(own.keys));
      for (size_t t = 0; t < num_tables; ++t) floats += own.counts[t] * dims[t];
    }
    messages[m] = {std::make_unique<KeptPages>(static_cast<size_t>(heads + floats) * 4), heads + floats, heads};
    auto* words = reinterpret_cast<int32_t*>(messages[m].words->bytes());
    for (const auto& of_node : chosen) words = write_keys(of_node[m].keys, words);
    auto* to = reinterpret_cast<std::byte*>(words);
    for (size_t k = 0; k < nodes.size(); ++k) {
      const Chosen& own = chosen[k][m];
      const int64_t* rows = own.rows.data();
      const float* sums = nodes[k].sums;
      for (size_t t = 0; t < num_tables; ++t) {
        const int64_t row_bytes = 4 * dims[t];
        if (own.counts[t])
          copies.push_back({reinterpret_cast<const std::byte*>(sums), rows, own.counts[t], row_bytes, to});
        rows += own.counts[t];
        to += own.counts[t] * row_bytes;
        sums += nodes[k].counts[t] * dims[t];
      }
    }
  }
  copy_rows(copies, num_threads);
  return messages;
}

bool unpack_sums(const std::vector<ComingSums>& messages, const std::vector<std::pair<size_t, size_t>>& pieces,
                 const std::vector<int64_t>& first_keys, const std::vector<int64_t>& dims,
                 const std::vector<int64_t>& prefix, UnpackedSums& out) {
  const size_t num_tables = dims.size();
  struct NodeRows {
    std::vector<int64_t> keys;
    std::vector<size_t> first, last;  // by table, of those to take
    std::vector<int64_t> starts;      // by table, where the sums of these begin
  };
  std::vector<std::vector<NodeRows>> parts;
  for (const ComingSums& message : messages) {
    auto& own = parts.emplace_back(static_cast<size_t>(message.num_nodes));
    const int32_t *next = message.words, *end = message.words + message.num_words;
    for (NodeRows& part : own) {
      next = read_keys(next, end - next, first_keys[num_tables], part.keys);
      if (!next) return false;
    }
    int64_t at = next - message.words;
    for (NodeRows& part : own) {
      const auto begin = part.keys.begin();
      size_t done = 0;
      for (size_t t = 0; t < num_tables; ++t) {
        const auto below = [&](int64_t key) {
          return static_cast<size_t>(std::lower_bound(begin + done, part.keys.end(), key) - begin);
        };
        const size_t stop = below(first_keys[t + 1]);
        const size_t cut = message.taken == Taken::all ? done : below(first_keys[t] + prefix[t]);
        part.first.push_back(message.taken == Taken::from_prefix ? cut : done);
        part.last.push_back(message.taken == Taken::below_prefix ? cut : stop);
        part.starts.push_back(at + static_cast<int64_t>(part.first[t] - done) * dims[t]);
        at += static_cast<int64_t>(stop - done) * dims[t];
        done = stop;
      }
    }
    if (at != message.num_words) return false;
  }
  for (size_t t = 0; t < num_tables; ++t) {
    for (const auto& [m, k] : pieces) {
      const NodeRows& part = parts[m][k];
      out.counts.push_back(static_cast<int64_t>(part.last[t] - part.first[t]));
      out.starts.push_back(part.starts[t]);
      out.total_rows += out.counts.back();
    }
  }
  out.rows = std::make_unique<KeptPages>(static_cast<size_t>(out.total_rows) * sizeof(int64_t));
  auto* rows = reinterpret_cast<int64_t*>(out.rows->bytes());
  for (size_t t = 0; t < num_tables; ++t) {
    for (const auto& [m, k] : pieces) {
      const NodeRows& part = parts[m][k];
      for (size_t i = part.first[t]; i < part.last[t]; ++i) *rows++ = part.keys[i] - first_keys[t];
    }
  }
  return true;
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
