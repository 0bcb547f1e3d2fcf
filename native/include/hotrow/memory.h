// Memory for tables, optimizer state and scratch: whole pages, huge ones if the system grants them.
#pragma once

#include <cstddef>

namespace hotrow {

// Zeroed memory in whole pages; from 2 MiB up it is aligned to 2 MiB, and huge pages are requested. sparse: only a part
// of the address space will be touched, so the system is not asked whether it has memory for all of it.
struct Pages {
  void* data;  // null: no memory
  size_t bytes;
  bool huge;  // the system took the request for huge pages
};
Pages allocate_pages(size_t bytes, bool sparse = false);
void free_pages(const Pages& pages);
// Gives whole pages within these bytes of private memory back to the system; their contents are lost.
void drop_pages_within(void* data, size_t bytes);

// Uninitialized memory for arrays that live no longer than a step. Pages that are given back are kept for reuse,
// because faulting in new ones costs as much as a pass over them. The process keeps at most kMostKeptBytes idle; any
// thread may take and give back.
inline constexpr size_t kMostKeptBytes = size_t{1} << 29;
Pages take_pages(size_t bytes);
void give_back_pages(const Pages& pages) noexcept;

// While locked, no thread can take or give back; used around a fork.
void lock_kept_pages();
void unlock_kept_pages();

// Kept pages for as long as this object lives. Throws std::bad_alloc.
class KeptPages {
 public:
  explicit KeptPages(size_t bytes);
  KeptPages(const KeptPages&) = delete;
  KeptPages& operator=(const KeptPages&) = delete;
  ~KeptPages() { give_back_pages(pages_); }

  std::byte* bytes() const { return static_cast<std::byte*>(pages_.data); }
  float* floats() const { return static_cast<float*>(pages_.data); }

 private:
  Pages pages_;
};

}  // namespace hotrow
