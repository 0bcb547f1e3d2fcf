// Turns runs of partial counts into a vocabulary file, and looks up keys in one. docs/vocabulary.md has its layout.
//
// Everything streams: runs are merged in hash order, keys that reach the minimum count are sorted by popularity, and
// the resulting pairs (index in hash order, row) are sorted back; a sort that exceeds its share of the memory budget
// spills to unlinked temporary files. So the result depends neither on the budget nor on how counts are divided into
// runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hotrow {

// error: 0, an errno, or EBADMSG if a file is damaged; what: which file, in words.
struct Status {
  int error = 0;
  std::string what;
  bool ok() const { return error == 0; }
};

// Merges runs (descriptors of complete run files) into one run written to `out_fd`.
Status merge_runs(const std::vector<int>& run_fds, int out_fd, size_t memory_bytes);

class VocabularyBuilder {
 public:
  // tmp_dir: where temporary files go. memory_bytes: what this object may hold at any one time, at least 1 MiB.
  VocabularyBuilder(bool has_bytes, std::string tmp_dir, size_t memory_bytes);
  ~VocabularyBuilder();

  // Sums the counts of the runs; keys (and the missing value) seen at least min_count times become candidates for a
  // row.
  Status merge(const std::vector<int>& run_fds, uint64_t min_count);

  // Numbers the candidates 1, 2, ... by falling count, ties by first appearance, up to max_rows rows in all (0: no
  // limit); row 0 is for everything else. Writes counts by row at `offset` of counts_fd, as uint32 or uint64 (wide).
  Status rank(uint64_t max_rows, int counts_fd, uint64_t offset, bool wide);

  // Sections of the vocabulary file. Sizes of all but key_bytes follow from num_rows(); key_bytes comes last.
  enum Section { kDirectory, kHashes, kRows, kKeyOffsets, kKeyBytes, kNumSections };
  struct SectionInfo {
    uint64_t offset;     // in: where it starts in the file
    uint64_t num_bytes;  // out
    uint32_t crc;        // out
  };
  Status write(int fd, uint32_t directory_bits, bool wide, SectionInfo sections[kNumSections]);

  uint64_t num_accesses() const;  // after merge: occurrences counted, missing values included
  uint64_t num_distinct() const;  // after merge: keys seen, the missing value not included
  uint64_t num_keys() const;      // after rank: keys with a row of their own
  uint64_t num_rows() const;      // after rank: row 0 and the missing value's row included
  uint64_t missing_row() const;   // after rank: 0 if the missing value has no row of its own

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A vocabulary in memory or mapped, or the slice of one that begins at directory bucket `first_bucket`:
//
//   bucket = (hash >> (64 - directory_bits)) - first_bucket
//   for j in [directory[bucket], directory[bucket + 1]): if hashes[j] == hash and key j == key: return rows[j]
//   return 0
template <class Index>
struct LookupTable {
  uint32_t directory_bits;
  uint64_t first_bucket;
  uint64_t num_buckets;
  const Index* directory;  // [num_buckets + 1]
  const uint64_t* hashes;  // sorted
  const Index* rows;
  const uint64_t* key_offsets;  // with bytes: key j is key_bytes[key_offsets[j] : key_offsets[j + 1]], else null
  const uint8_t* key_bytes;
};

// out[i] = row of key i; missing_row if valid[i] == 0 (valid null: no key is missing). Keys outside the slice get 0.
template <class Index, class Out>
void lookup_rows(const LookupTable<Index>& table, const uint64_t* hashes, const uint8_t* valid, const uint8_t* bytes,
                 const int64_t* offsets, size_t num_keys, uint64_t missing_row, Out* out);

}  // namespace hotrow
