// Hashes of raw ids, part of the vocabulary file format (docs/vocabulary.md): they must not change within a version.
//
//   mix64(x):            x ^= x >> 33; x *= 0xff51afd7ed558ccd; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53; x ^= x >> 33
//   hash of an integer:  mix64(key)                 one-to-one, so equal hashes mean equal keys
//   hash of a string:    h = mix64(num_bytes); for each 8-byte little-endian word w, zero-padded: h = mix64(h ^ w)
//   with a hash cap c:   mix64(key mod c), or mix64(hash of the string mod c); the result of mod is in [0, c)
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hotrow {

static_assert(std::endian::native == std::endian::little, "files and hashes are little-endian");

inline uint64_t mix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

inline uint64_t hash_string(const uint8_t* bytes, size_t num_bytes) {
  uint64_t h = mix64(num_bytes);
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    h = mix64(h ^ word);
  }
  if (num_bytes != 0) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, num_bytes);
    h = mix64(h ^ word);
  }
  return h;
}

// out[i] = hash of keys[i]; cap = 0 means no cap. Without a cap a negative key is its 64-bit two's complement; with one
// the non-negative remainder is taken.
void hash_keys(const uint32_t* keys, size_t num_keys, uint64_t cap, uint64_t* out);
void hash_keys(const int64_t* keys, size_t num_keys, uint64_t cap, uint64_t* out);

// Key i is bytes[offsets[i] : offsets[i + 1]].
void hash_keys(const uint8_t* bytes, const int64_t* offsets, size_t num_keys, uint64_t cap, uint64_t* out);

}  // namespace hotrow
