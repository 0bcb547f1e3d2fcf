// Finds the rows with most accesses in fixed memory; see sketch.h.
#include "sketch.h"

#include <hotrow/encode_hash.h>

namespace hotrow {

namespace {

constexpr size_t kAhead = 16;  // ids between a prefetch of a bucket and its use

inline void count(uint64_t* bucket, uint64_t key) {
  size_t least = 0;
  for (size_t k = 0; k < kSketchSlots; ++k) {
    if (bucket[k] >> 24 == key) {
      bucket[k] += (bucket[k] & kSketchScore) != kSketchScore;
      return;
    }
    if ((bucket[k] & kSketchScore) < (bucket[least] & kSketchScore)) least = k;
  }
  if ((bucket[least] & kSketchScore) > 1) {
    --bucket[least];
    return;
  }
  for (size_t k = least; k + 1 < kSketchSlots; ++k) bucket[k] = bucket[k + 1];
  bucket[kSketchSlots - 1] = key << 24 | 1;
}

}  // namespace

template <class Id>
void sketch_add(uint64_t* slots, size_t num_buckets, uint64_t seed, uint64_t first_key, const Id* ids, size_t num_ids) {
  const uint64_t salt = mix64(seed + 1);
  const auto bucket_of = [&](Id id) {
    const uint64_t hash = mix64((first_key + static_cast<uint64_t>(id)) ^ salt);
    return slots + ((hash >> 32) * num_buckets >> 32) * kSketchSlots;
  };
  for (size_t i = 0; i < num_ids; ++i) {
    if (i + kAhead < num_ids) __builtin_prefetch(bucket_of(ids[i + kAhead]), 1);
    if (ids[i] != 0) count(bucket_of(ids[i]), first_key + static_cast<uint64_t>(ids[i]));
  }
}

template void sketch_add(uint64_t*, size_t, uint64_t, uint64_t, const int32_t*, size_t);
template void sketch_add(uint64_t*, size_t, uint64_t, uint64_t, const int64_t*, size_t);

}  // namespace hotrow
