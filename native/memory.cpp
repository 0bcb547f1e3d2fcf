// Memory for tables, optimizer state and scratch; see hotrow/memory.h.
#include <hotrow/memory.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace hotrow {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Pages allocate_pages(size_t bytes, bool sparse) {
  // Below one huge page there is nothing to gain: rounding up a tiny table would only waste memory.
  const bool large = bytes >= kHugePage;
  const size_t unit = large ? kHugePage : static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = round_up(bytes ? bytes : 1, unit);
  const size_t slack = large ? kHugePage : 0;
#ifdef MAP_NORESERVE
  const int reserve = sparse ? MAP_NORESERVE : 0;
#else
  const int reserve = 0;
#endif
  void* map = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | reserve, -1, 0);
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

void drop_pages_within(void* data, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<size_t>(data);
  const size_t first = round_up(start, page), last = (start + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

namespace {

// Oldest first. Never destroyed, because arrays may be freed while the process exits.
std::mutex& kept_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}
std::vector<Pages>& kept_pages() {
  static std::vector<Pages>& pages = *new std::vector<Pages>;
  return pages;
}

}  // namespace

Pages take_pages(size_t bytes) {
  {
    const std::lock_guard lock(kept_mutex());
    std::vector<Pages>& kept = kept_pages();
    auto best = kept.end();
    for (auto it = kept.begin(); it != kept.end(); ++it) {
      const bool fits = bytes <= it->bytes && it->bytes / 2 <= std::max(bytes, kHugePage);
      if (fits && (best == kept.end() || it->bytes <= best->bytes)) best = it;
    }
    if (best != kept.end()) {
      const Pages pages = *best;
      kept.erase(best);
      return pages;
    }
  }
  // An eighth more than asked for: multi-hot batches differ in size, and otherwise each would need new pages.
  return allocate_pages(bytes + bytes / 8);
}

void give_back_pages(const Pages& pages) noexcept {
  if (!pages.data) return;
  const std::lock_guard lock(kept_mutex());
  std::vector<Pages>& kept = kept_pages();
  try {
    kept.push_back(pages);
  } catch (const std::bad_alloc&) {
    return free_pages(pages);  // destructors call this
  }
  size_t total = 0;
  for (const Pages& each : kept) total += each.bytes;
  while (total > kMostKeptBytes) {
    total -= kept.front().bytes;
    free_pages(kept.front());
    kept.erase(kept.begin());
  }
}

void lock_kept_pages() { kept_mutex().lock(); }
void unlock_kept_pages() { kept_mutex().unlock(); }

KeptPages::KeptPages(size_t bytes) : pages_(take_pages(bytes)) {
  if (!pages_.data) throw std::bad_alloc();
}

}  // namespace hotrow
