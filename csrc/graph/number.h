/* number.h - numbers in text, with a point whatever locale the host program has set: the thread's numeric locale is C
 * while they are read or written.
 */
#ifndef OM_NUMBER_H
#define OM_NUMBER_H

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct om_c_locale { locale_t c, old; } om_c_locale;
static inline om_c_locale om_c_locale_enter(void) {
    om_c_locale l = {newlocale(LC_NUMERIC_MASK, "C", (locale_t)0), (locale_t)0};
    if (l.c) l.old = uselocale(l.c);
    return l;
}
static inline void om_c_locale_leave(om_c_locale l) {
    if (l.c) uselocale(l.old), freelocale(l.c);
}

/* The number text begins with; *end (not NULL): behind it, or text itself when there is none. */
static inline double om_number_read(const char *text, char **end) {
    const om_c_locale l = om_c_locale_enter();
    const double x = strtod(text, end);
    om_c_locale_leave(l);
    return x;
}
static inline void om_number_write(char text[64], double x) { /* reads back as the same double */
    const om_c_locale l = om_c_locale_enter();
    snprintf(text, 64, "%.17g", x);
    om_c_locale_leave(l);
}
#endif
