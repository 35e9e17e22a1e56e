"""Lists of English words and names for constraints and the splitting of sentences.

Those for sentences were chosen so that `sentences` splits as NLTK's Punkt does with its English model (Kiss and Strunk 2006,
Unsupervised Multilingual Sentence Boundary Detection).
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ABBREVIATIONS = frozenset(
    _words("""
    mr mrs ms messrs dr prof gen sen rep reps lt maj adm col st jr sr
    jan feb aug sep sept oct nov dec tues wed fri a.m p.m a.d yr
    u.s u.s.a u.k u.n u.s.s.r d.c n.y n.j n.c n.d n.h n.m n.v s.c r.i l.a w.va
    ala ariz calif colo conn fla ga ill kan ky mich minn nev okla ore pa tenn va vt wash wis
    inc ltd co cos corp bros cie b.v s.a ph.d m.b.a j.k j.r vs ft mg ct ave sw ok
    c d e f g h k l m n p r s t v w
    """)
)
"""Abbreviations, whose full stop does not end a sentence. Without e.g., i.e. and etc., which Punkt lacks."""

FREQUENT_STARTERS = frozenset(
    _words("""
    the he it they i this these there some many most both even but yet nor so thus if when while since though although
    however instead indeed in under despite according among moreover meanwhile nevertheless nonetheless similarly
    separately
    """)
)
"""Words that often begin a sentence."""

STARTERS = frozenset(
    _words("""
    able above accordingly allow almost along already always anyone anything ask become behind being believe better
    between beyond blood body build call cannot car certainly check choose cold consider contact create currently
    dark decide develop discover does doing door earlier early eating eight else enough ensure enter especially ever
    explore fact final finally follow following friend going happen happy her here him hot hour hundreds idea
    important include indeed inside instead learn looking lot meaning millions mine minus moment moreover morning
    need neither nevertheless nor nothing okay ours overall pass person pick play please possibly probably provide
    put question recent recently remain remember remove result right sad same seeing seem select seven simply single
    sit so someone sometimes soon sorry speak stand starting still such surely taking team ten thank thanks them
    therefore think through throughout thus together tomorrow true try trying turn ultimately unfortunately unless
    unlike upon us very wait walk whenever whether which whom within without working yes yesterday yet your
    """)
)
"""Words that have a capital at the beginning of a sentence only."""

COMMON_WORDS = STARTERS | frozenset(
    _words("""
    a about across actually add after again against age air all also although among an and another answer any are
    area art as at avoid b back bad basically because before below best big black blue book both bring business but
    buy by c can change child city clearly coming continue could cut d day design despite did do during each eat
    education end even every everyone everything face fall far feel find fine first five food for force four from
    game generally get give go good great green grow had half hand have having he head health help high higher his
    history home house how however if in information is issue it its job just keep key kind know large last later
    law learning leave less let level life light like line live long look love main make making man many may maybe
    me meet might money month more most move moving much music must my natural never new next nice no nobody none
    not now of offer office often old on once one only open or other our out outside over part party pay people
    perhaps place plus point policy power public quick quite raise rather reach read reason red report research room
    run s say saying second see sell service set several she should show side since six small some something special
    start stay stop story study sure take tell test that the their then there these they thing third this those
    three time to today too two under until up use usually visit want war watch water way we week well what whatever
    when where while white who whose why will with woman word world would write wrong year you young z
    """)
)
"""Words that are known without a capital, as names are not."""

PRONOUNS = frozenset(
    _words("""
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves
    """)
)

STOP_WORDS = (PRONOUNS - {"mine", "us"}) | frozenset(
    _words("""
    what which who whom this that these those am is are was were be been being have has had having do does did doing
    will should can now shan won don didn doesn hadn hasn haven isn ain aren couldn mightn mustn needn shouldn wasn
    weren wouldn s t d ll m o re ve y ma a an the and but if or because as until while of at by for with about against
    between into through during before after above below to from up down in out on off over under again further then
    once here there when where why how all any both each few more most other some such no nor not only own same so than
    too very just
    """)
)
"""nltk's stop words, but for those with an apostrophe."""

CONJUNCTIONS = frozenset(_words("and but for nor or so yet"))

PERSON_NAMES = _words("""
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper
    Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah
    Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
""")

NORTHERN_CAPITALS = _words("""
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw
    London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb
""")
"""Capitals of Europe north of 45 degrees, from the north."""
