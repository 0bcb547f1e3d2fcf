// What to do around a fork; see hotrow/parallel.h and hotrow/memory.h.
#include <hotrow/memory.h>
#include <hotrow/parallel.h>
#include <pthread.h>

namespace hotrow {
namespace {

bool forked = false;  // written by the child's only thread before anything else runs there

}  // namespace

bool in_forked_child() { return forked; }

void watch_forks() {
  // Another thread may hold the lock of the kept pages when this one forks: the child would never see it released.
  pthread_atfork(lock_kept_pages, unlock_kept_pages, [] {
    unlock_kept_pages();
    forked = true;
  });
}

}  // namespace hotrow
