// Sorts more records than fit in memory: sorted segments in one unlinked temporary file, merged while reading.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "hotrow/encode_count.h"
#include "hotrow/encode_stream.h"

namespace hotrow {

// A private file in `folder` without a name, so that nothing is left behind whatever happens.
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

// The heads of several ascending sequences, the smallest on top. Replacing the top takes one walk down; the standard
// library's heaps need a pop and a push.
template <class Head>
class MergeHeap {
 public:
  bool empty() const { return heads_.empty(); }
  Head& top() { return heads_.front(); }
  void add(const Head& head) {
    heads_.push_back(head);
    for (size_t i = heads_.size() - 1; i != 0 && heads_[i] < heads_[(i - 1) / 2]; i = (i - 1) / 2)
      std::swap(heads_[i], heads_[(i - 1) / 2]);
  }
  // Must be called after top() has been set to the next value of its sequence.
  void settle_top() {
    const Head head = heads_.front();
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < heads_.size(); i = child) {
      if (child + 1 < heads_.size() && heads_[child + 1] < heads_[child]) ++child;
      if (!(heads_[child] < head)) break;
      heads_[i] = heads_[child];
    }
    heads_[i] = head;
  }
  // Must be called when the sequence of top() has ended.
  void drop_top() {
    heads_.front() = heads_.back();
    heads_.pop_back();
    if (!heads_.empty()) settle_top();
  }

 private:
  std::vector<Head> heads_;
};

// Records are plain values with operator<. push() takes any number; drain() then visits them once, in ascending order.
template <class Record>
class ExternalSorter {
 public:
  ExternalSorter(const std::string& folder, size_t memory_bytes)
      : file_(folder), capacity_(std::max<size_t>(memory_bytes / sizeof(Record), 256)), error_(file_.error()) {}

  void push(const Record& record) {
    if (records_.size() == capacity_) spill();
    records_.reserve(records_.size() + 1);
    records_.append(&record, 1);
  }

  // Calls visit(record) for all records in order, with read buffers of about memory_bytes in all; returns 0 or an
  // errno.
  template <class Visit>
  int drain(size_t memory_bytes, Visit visit) {
    if (error_ == 0 && segments_.empty()) {
      sort();
      for (size_t i = 0; i < records_.size(); ++i) visit(records_[i]);
      records_.clear();
      return 0;
    }
    spill();
    records_.clear();
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
    bool operator<(const Head& other) const { return record < other.record; }
  };

  void sort() { std::sort(records_.data(), records_.data() + records_.size()); }

  void spill() {
    sort();
    Writer out(file_.fd(), end_, size_t{1} << 18);
    out.put(records_.data(), records_.size() * sizeof(Record));
    if (error_ == 0) error_ = out.flush();
    segments_.push_back({end_, out.num_bytes()});
    end_ += out.num_bytes();
    records_.restart();
  }

  template <class Visit>
  int merge(size_t memory_bytes, Visit visit) {
    const size_t buffer = std::max<size_t>(memory_bytes / segments_.size() / sizeof(Record), 64) * sizeof(Record);
    std::vector<Reader> readers;
    MergeHeap<Head> heap;
    readers.reserve(segments_.size());
    for (const Segment& segment : segments_) {
      readers.emplace_back(file_.fd(), segment.offset, segment.num_bytes, buffer);
      Head head{{}, readers.size() - 1};
      if (readers.back().get(&head.record)) heap.add(head);
    }
    while (!heap.empty()) {
      visit(heap.top().record);
      if (readers[heap.top().segment].get(&heap.top().record))
        heap.settle_top();
      else
        heap.drop_top();
    }
    for (const Reader& reader : readers)
      if (reader.error() != 0) return reader.error();
    return 0;
  }

  TemporaryFile file_;
  size_t capacity_;
  int error_;
  uint64_t end_ = 0;
  GrowArray<Record> records_;
  std::vector<Segment> segments_;
};

}  // namespace hotrow
