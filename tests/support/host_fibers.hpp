// Threads of a block as fibers that take turns. They switch by _setjmp and _longjmp: swapcontext asks the system for the signal mask
// at each switch, which takes longer than most instructions between two switches.
#pragma once
#include <sys/mman.h>
#include <cstdlib>
#include <setjmp.h>
#include <ucontext.h>

template <unsigned MOST, size_t STACK> struct Fibers {
    jmp_buf scheduler, places[MOST];
    bool begun[MOST];
    char* stacks;
    void (*entry)();

    void make(unsigned thread) {
        // Not counted as memory in use: a worker holds those of a hundred kernels, and could not fork.
        if (!stacks) stacks = static_cast<char*>(mmap(nullptr, MOST * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        begun[thread] = false;
    }
    __attribute__((noinline)) void enter(unsigned thread) {  // until it waits or ends
        if (_setjmp(scheduler)) return;
        if (begun[thread]) _longjmp(places[thread], 1);
        begun[thread] = true;
        ucontext_t first;
        getcontext(&first);
        first.uc_stack.ss_sp = stacks + thread * STACK;
        first.uc_stack.ss_size = STACK;
        first.uc_link = nullptr;
        makecontext(&first, entry, 0);
        setcontext(&first);
    }
    __attribute__((noinline)) void wait(unsigned thread) {
        if (!_setjmp(places[thread])) _longjmp(scheduler, 1);
    }
    void end() { _longjmp(scheduler, 1); }
};
