// Sorting more records than fit in memory: sorted segments in one unlinked temporary file, merged while reading.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "hotrow/encode_stream.h"

namespace hotrow {

// A private file in `folder` that no name leads to, so that nothing is left behind whatever happens.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& folder) {
    std::string path = folder + "/hotrow-XXXXXX";
    fd_ = mkstemp(path.data());
    error_ = fd_ < 0 ? errno : 0;
    if (fd_ >= 0) unlink(path.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  int error() const { return error_; }

 private:
  int fd_;
  int error_;
};

// Records are plain values with operator<. push() any number, then drain() visits them in ascending order, once.
template <class Record>
class ExternalSorter {
 public:
  ExternalSorter(const std::string& folder, size_t memory_bytes)
      : file_(folder), capacity_(std::max<size_t>(memory_bytes / sizeof(Record), 256)), error_(file_.error()) {}

  void push(const Record& record) {
    if (records_.size() == capacity_) spill();
    if (records_.size() == records_.capacity()) records_.reserve(std::min(capacity_, 2 * records_.size() + 1024));
    records_.push_back(record);
  }

  // Calls visit(record) for all in order, with read buffers of about memory_bytes together; returns 0 or an errno.
  template <class Visit>
  int drain(size_t memory_bytes, Visit visit) {
    if (error_ == 0 && segments_.empty()) {
      std::sort(records_.begin(), records_.end());
      for (const Record& record : records_) visit(record);
      records_ = {};
      return 0;
    }
    spill();
    records_ = {};
    return error_ != 0 ? error_ : merge(memory_bytes, visit);
  }

 private:
  struct Segment {
    uint64_t offset;
    uint64_t num_bytes;
  };
  struct Head {
    Record record;
    size_t segment;
    bool operator<(const Head& other) const { return other.record < record; }  // std heaps keep the largest in front
  };

  void spill() {
    std::sort(records_.begin(), records_.end());
    Writer out(file_.fd(), end_, size_t{1} << 18);
    out.put(records_.data(), records_.size() * sizeof(Record));
    if (error_ == 0) error_ = out.flush();
    segments_.push_back({end_, out.num_bytes()});
    end_ += out.num_bytes();
    records_.clear();
  }

  template <class Visit>
  int merge(size_t memory_bytes, Visit visit) {
    const size_t buffer = std::max<size_t>(memory_bytes / segments_.size() / sizeof(Record), 64) * sizeof(Record);
    std::vector<Reader> readers;
    std::vector<Head> heap;
    for (const Segment& segment : segments_) {
      readers.emplace_back(file_.fd(), segment.offset, segment.num_bytes, buffer);
      Head head{{}, readers.size() - 1};
      if (readers.back().get(&head.record)) heap.push_back(head);
    }
    std::make_heap(heap.begin(), heap.end());
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      visit(heap.back().record);
      Reader& reader = readers[heap.back().segment];
      if (reader.get(&heap.back().record)) {
        std::push_heap(heap.begin(), heap.end());
      } else {
        if (reader.error() != 0) return reader.error();
        heap.pop_back();
      }
    }
    return 0;
  }

  TemporaryFile file_;
  size_t capacity_;
  int error_;
  uint64_t end_ = 0;
  std::vector<Record> records_;
  std::vector<Segment> segments_;
};

}  // namespace hotrow
