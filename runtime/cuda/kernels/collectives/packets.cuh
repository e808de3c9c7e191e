// Packets that the GPUs of one host write into one another's memory: two words of data, each beside a flag. Eight bytes that are written in
// one access are seen together, so a word has arrived when its flag has, and no fence is needed.
#pragma once

DEVICE void put_packet(char* at, const uint2& data, u32 flag) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(at), "r"(data.x), "r"(flag), "r"(data.y) : "memory");
}

// Whether the packet with this flag has arrived, and its data. Bypasses L1: writes of another GPU do not reach it.
DEVICE bool take_packet(uint2& data, const char* at, u32 flag) {
    u32 first, second;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(data.x), "=r"(first), "=r"(data.y), "=r"(second) : "l"(at) : "memory");
    return first == flag && second == flag;
}

// A word that the host or another GPU writes.
DEVICE u32 word_now(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
DEVICE void tell(u32* at, u32 value) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory"); }

DEVICE u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
