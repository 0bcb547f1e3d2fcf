// Memory for tables, optimizer state and scratch; see hotrow/embedding.h.
#include <hotrow/embedding.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace hotrow {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Pages allocate_pages(size_t bytes) {
  // Under one huge page there is nothing to win: a rounded-up tiny table would only waste memory.
  const bool large = bytes >= kHugePage;
  const size_t unit = large ? kHugePage : static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = round_up(bytes ? bytes : 1, unit);
  const size_t slack = large ? kHugePage : 0;
  void* map = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return {nullptr, 0, false};
  std::byte* start = static_cast<std::byte*>(map);
  std::byte* aligned = start + (round_up(reinterpret_cast<size_t>(start), unit) - reinterpret_cast<size_t>(start));
  if (aligned > start) munmap(start, static_cast<size_t>(aligned - start));
  const size_t after = static_cast<size_t>(start + slack - aligned);
  if (after) munmap(aligned + size, after);
#ifdef MADV_HUGEPAGE
  const bool huge = large && madvise(aligned, size, MADV_HUGEPAGE) == 0;
#else
  const bool huge = false;
#endif
  return {aligned, size, huge};
}

void free_pages(const Pages& pages) {
  if (pages.data) munmap(pages.data, pages.bytes);
}

std::byte* Scratch::reserve(size_t bytes) {
  if (bytes > pages_.bytes) {
    free_pages(pages_);
    // A quarter more than asked: multi-hot batches differ in size, and every growth faults its pages in anew.
    pages_ = allocate_pages(bytes + bytes / 4);
    if (!pages_.data) throw std::bad_alloc();
  }
  return static_cast<std::byte*>(pages_.data);
}

Scratch::~Scratch() { free_pages(pages_); }

}  // namespace hotrow
