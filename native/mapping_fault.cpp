// See hotrow/mapping_fault.h. The handler calls only what is safe in a signal handler: fstat, sigaction, raise,
// lock-free atomics, and writev, which no standard lists with write but which is a bare system call like it.
#include <hotrow/mapping_fault.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace hotrow {

// Places for mappings, a list that only grows; places that are given up are reused.
struct FaultRegistry {
  struct Entry {
    std::atomic<const WatchedMapping*> mapping;
    Entry* next;
  };
  static inline std::atomic<Entry*> first{nullptr};
  static inline std::atomic<int> readers{0};  // handlers that are looking at mappings now
  static_assert(decltype(first)::is_always_lock_free && decltype(readers)::is_always_lock_free);

  static void add(const WatchedMapping* mapping) {
    for (Entry* place = first; place; place = place->next) {
      const WatchedMapping* none = nullptr;
      if (place->mapping.compare_exchange_strong(none, mapping)) return;
    }
    auto* place = new Entry{{mapping}, first};  // lives as long as the process, as handlers do
    while (!first.compare_exchange_weak(place->next, place)) {
    }
  }

  // Returns when no handler is looking at it any more.
  static void remove(const WatchedMapping* mapping) {
    for (Entry* place = first; place; place = place->next) {
      const WatchedMapping* own = mapping;
      if (place->mapping.compare_exchange_strong(own, nullptr)) break;
    }
    while (readers != 0) usleep(1000);
  }

  // Whether the address is in a watched mapping; if so, the message has been printed.
  static bool report(const siginfo_t& info) {
    const auto at = reinterpret_cast<uintptr_t>(info.si_addr);
    ++readers;
    bool found = false;
    for (const Entry* place = first; place && !found; place = place->next) {
      const WatchedMapping* mapping = place->mapping;
      if (!mapping) continue;
      const auto begin = reinterpret_cast<uintptr_t>(mapping->rows_.begin);
      found = begin <= at && at - begin < static_cast<uintptr_t>(mapping->rows_.bytes);
      if (found) report_fault(*mapping, static_cast<int64_t>(at - begin), info);
    }
    --readers;
    return found;
  }

  static void report_fault(const WatchedMapping& mapping, int64_t offset, const siginfo_t& info);
};

namespace {

struct sigaction before;  // written before the handler is installed
int64_t page_bytes = 4096;

// Formats a number in decimal without library functions, which may take locks or memory.
struct Digits {
  char text[20];
  char* begin = text + sizeof text;
  explicit Digits(int64_t number) {
    do *--begin = static_cast<char>('0' + number % 10);
    while ((number /= 10) != 0);
  }
  iovec piece() { return {begin, static_cast<size_t>(text + sizeof text - begin)}; }
};

iovec piece(const char* text) { return {const_cast<char*>(text), std::strlen(text)}; }

bool medium_said_so(const siginfo_t& info) {
#ifdef BUS_MCEERR_AR
  return info.si_code == BUS_MCEERR_AR;
#else
  (void)info;
  return false;
#endif
}

// Whether an instruction caused it, which runs again when the handler returns; other signals were sent.
bool is_fault(const siginfo_t& info) { return info.si_code == BUS_ADRERR || medium_said_so(info); }

// Calls the earlier handler, as if ours did not exist. An ignored fault still ends the process, by the system's rules.
void pass_on(int signal, siginfo_t* info, void* context) {
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  if (before.sa_handler == SIG_IGN && !is_fault(*info)) return;
  sigaction(SIGBUS, &before, nullptr);
  if (!is_fault(*info)) raise(SIGBUS);  // taken when the handler returns
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (is_fault(*info) && FaultRegistry::report(*info)) {
    sigaction(SIGBUS, &before, nullptr);
  } else {
    pass_on(signal, info, context);
  }
  errno = error;
}

void install() {
  page_bytes = sysconf(_SC_PAGESIZE);
  sigaction(SIGBUS, nullptr, &before);
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;  // on faulthandler's stack, if it has one
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
  // Handlers on other threads are not in the child.
  pthread_atfork(nullptr, nullptr, [] { FaultRegistry::readers = 0; });
}

}  // namespace

// The rows of the missing page; each of them is lost.
void FaultRegistry::report_fault(const WatchedMapping& mapping, int64_t offset, const siginfo_t& info) {
  const MappedRows& rows = mapping.rows_;
  const int64_t start = offset / page_bytes * page_bytes - rows.first_row_bytes;
  const int64_t most = std::max<int64_t>(0, rows.num_rows - 1);
  const int64_t first_row = std::clamp<int64_t>(start / rows.record_bytes, 0, most);
  const int64_t last_row = std::clamp<int64_t>((start + page_bytes - 1) / rows.record_bytes, 0, most);
  const bool one = first_row == last_row;
  Digits first(first_row), last(last_row);
  struct stat found;
  const bool cut = !medium_said_so(info) && fstat(rows.fd, &found) == 0 && found.st_size < rows.bytes;
  iovec text[] = {
      piece(one ? "hotrow: row " : "hotrow: rows "),
      first.piece(),
      piece(one ? "" : " to "),
      one ? piece("") : last.piece(),
      piece(mapping.where_.c_str()),
      piece(cut ? "something cut the file short while rows were copied; find out what"
                : "its medium failed; look into the kernel's log (dmesg)"),
      piece(", then go on from the last checkpoint: hotrow train --resume FOLDER. Nothing was trained on wrong rows\n"),
  };
  if (writev(STDERR_FILENO, text, sizeof text / sizeof *text) < 0) return;  // there is nobody left to tell
}

WatchedMapping::WatchedMapping(const MappedRows& rows, const std::string& table, const std::string& path)
    : rows_(rows), where_(" of table '" + table + "' in " + path + " are lost, and the process ends (SIGBUS): ") {
  static std::once_flag installed;  // another thread's mapping waits until the handler is there
  std::call_once(installed, install);
  FaultRegistry::add(this);
}

WatchedMapping::~WatchedMapping() { FaultRegistry::remove(this); }

}  // namespace hotrow
