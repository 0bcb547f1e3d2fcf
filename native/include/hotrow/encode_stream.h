// Sequential streams over file descriptors, with a CRC-32 of the bytes and a sticky error: after the first failure
// every call does nothing, so the caller needs to ask only once, at the end. The descriptor is borrowed, never closed.
#pragma once

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hotrow {

// CRC-32 as in zlib (polynomial 0xedb88320), eight bytes per step.
class Crc32 {
 public:
  void update(const void* data, size_t num_bytes) {
    const auto* p = static_cast<const uint8_t*>(data);
    for (; num_bytes >= 8; p += 8, num_bytes -= 8) {
      uint64_t word;
      std::memcpy(&word, p, 8);
      word ^= state_;
      state_ = 0;
      for (int i = 0; i < 8; ++i) state_ ^= kTables[7 - i][(word >> (8 * i)) & 255];
    }
    for (; num_bytes != 0; ++p, --num_bytes) state_ = state_ >> 8 ^ kTables[0][(state_ ^ *p) & 255];
  }
  uint32_t value() const { return ~state_; }

 private:
  using Tables = std::array<std::array<uint32_t, 256>, 8>;
  static constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
      tables[0][byte] = crc;
    }
    for (int t = 1; t < 8; ++t)
      for (int byte = 0; byte < 256; ++byte)
        tables[t][byte] = tables[t - 1][byte] >> 8 ^ tables[0][tables[t - 1][byte] & 255];
    return tables;
  }
  static const Tables kTables;
  uint32_t state_ = ~0u;
};
inline constexpr Crc32::Tables Crc32::kTables = Crc32::make_tables();

// Writes to the file from `offset` on; several writers may share a descriptor if their ranges are disjoint.
class Writer {
 public:
  Writer(int fd, uint64_t offset, size_t buffer_bytes) : fd_(fd), offset_(offset), buffer_(buffer_bytes) {}

  void put(const void* data, size_t num_bytes) {
    const auto* p = static_cast<const uint8_t*>(data);
    while (num_bytes != 0 && error_ == 0) {
      if (used_ == buffer_.size()) flush();
      const size_t part = num_bytes < buffer_.size() - used_ ? num_bytes : buffer_.size() - used_;
      std::memcpy(buffer_.data() + used_, p, part);
      used_ += part, p += part, num_bytes -= part;
    }
  }
  template <class T>
  void put(const T& value) {
    put(&value, sizeof(T));
  }

  // Writes what is buffered; returns 0 or the first errno.
  int flush() {
    crc_.update(buffer_.data(), used_);
    for (size_t done = 0; done < used_ && error_ == 0;) {
      const ssize_t n =
          pwrite(fd_, buffer_.data() + done, used_ - done, static_cast<off_t>(offset_ + num_bytes_ + done));
      if (n > 0)
        done += static_cast<size_t>(n);
      else if (n == 0)
        error_ = ENOSPC;
      else if (errno != EINTR)
        error_ = errno;
    }
    num_bytes_ += used_;
    used_ = 0;
    return error_;
  }
  uint64_t num_bytes() const { return num_bytes_ + used_; }
  uint32_t crc() const { return crc_.value(); }  // of what has been flushed

 private:
  int fd_;
  uint64_t offset_;
  std::vector<uint8_t> buffer_;
  size_t used_ = 0;
  uint64_t num_bytes_ = 0;
  int error_ = 0;
  Crc32 crc_;
};

// Reads file[offset : offset + num_bytes]; if the file ends earlier, the error is EBADMSG.
class Reader {
 public:
  Reader(int fd, uint64_t offset, uint64_t num_bytes, size_t buffer_bytes)
      : fd_(fd), offset_(offset), left_(num_bytes), buffer_(buffer_bytes) {}

  // Copies the next num_bytes and returns true; returns false if all is read (error() == 0) or reading failed.
  bool get(void* data, size_t num_bytes) {
    auto* p = static_cast<uint8_t*>(data);
    while (num_bytes != 0) {
      if (at_ == filled_ && !fill()) return false;
      const size_t part = num_bytes < filled_ - at_ ? num_bytes : filled_ - at_;
      std::memcpy(p, buffer_.data() + at_, part);
      at_ += part, p += part, num_bytes -= part;
    }
    return true;
  }
  template <class T>
  bool get(T* value) {
    return get(value, sizeof(T));
  }

  uint64_t num_bytes_left() const { return left_ + (filled_ - at_); }
  int error() const { return error_; }
  void fail(int error) {
    if (error_ == 0) error_ = error;
    left_ = at_ = filled_ = 0;
  }
  uint32_t crc() const { return crc_.value(); }  // of what has been read into the buffer

 private:
  bool fill() {
    if (left_ == 0) return false;
    const size_t want = left_ < buffer_.size() ? static_cast<size_t>(left_) : buffer_.size();
    ssize_t n;
    do n = pread(fd_, buffer_.data(), want, static_cast<off_t>(offset_));
    while (n < 0 && errno == EINTR);
    if (n <= 0) {
      fail(n < 0 ? errno : EBADMSG);
      return false;
    }
    at_ = 0;
    filled_ = static_cast<size_t>(n);
    offset_ += filled_;
    left_ -= filled_;
    crc_.update(buffer_.data(), filled_);
    return true;
  }

  int fd_;
  uint64_t offset_;
  uint64_t left_;
  std::vector<uint8_t> buffer_;
  size_t at_ = 0;
  size_t filled_ = 0;
  int error_ = 0;
  Crc32 crc_;
};

}  // namespace hotrow
