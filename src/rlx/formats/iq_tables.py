"""Constant tables of ggml's IQ and FP4 types: codebooks of short vectors, and scalar levels.

A grid (codebook) is a sorted set of numbers whose digits, lowest first, are the level indices of its vectors, so only
the differences between consecutive numbers are stored here.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from rlx.arrays import Array

_DISTANCES = (
    "c-rk(UvJ#F5f6vM5tpL0v@FZAt!y@%&7RLNwyx{*1wje~MH&=Ab3Gi2LvT-dx`#gWBlNM)ML$bFOFvI%NJ%Sio%X$50=ptba{m10H$&<P#72PfPsly"
    ";76{9Q_fW0Rft<{G{`c}MYj7=8i%QmdS>LqnEBBt)*~;@i@|ATr?v^KgeYISb?|`cA9N%rPftq09*51JP{I0z0>d&pe`O95WOcq&5Rdp6y+gi6EzYd"
    "Li^8>%c+beXhmaLRuP3`&i{rAv**jzbUzIpQ<Rqf*P)nbi5!uGHK1gg8v`?tRnFRJx&)zsDIhfg2a{%v#l`nGnT{&D^HRkQf;+1@;XNyG6;@gKqMCe"
    "y2EX_dN86xe!i6GSh@70z}*B|_KsV%P%`j6h(ax}s}zdm<=Kjv^`#CHJdpJ-kBj#A2&^-`wz?;Ohpr@2&<*BaHG#VOg(Q-V)%xb4wrIuy)tf<!j&i4"
    "Z=g)2kR!9k>f?I{eHxQtqDSfYiAqU$`Wf=u4YZ&O#tcy8n|2BLga<3EZxxMvavqcRp;Q(tq8KdhM&ttD1Tq!^{2brw=27v0?<U;Dn}c3Jw$RsS%rGB"
    "tv4MpH=wbfS7e>2EJIs&AL<&<iQaDD`lrjyo8?+;w%aYO*!sGw)|Y>)YsT+}=pMGP315i+2n!<Y$2TEC!iZhCq*Ed?7<)3N^cgmeOZEvzt`{`mKWdz"
    "sfwt`FXwyOl7`W?Jey1EC`hyQuKSK5(_E2O%m}>rlkq=)m4TjG7;F}#L+i?|#O!9u}6^pQ(`N^Xg_aw%8F{gzvMSNdbiIN3jlWaa`qv>_yJ3kV8KN8"
    "~KG?Fl4GL_$#!qNCIVn+Wha~m2^?C1S-wk#!wA17WPlmCEpfbOyBT`v}%`*CbtEE(ad9_f*sd|*>3*{-F<iIB>MGW>=CzO4QEAFpj652S&F6v^|zZn"
    "jRM%bo3Dq<zdrE}v4IQUEs=+UBkSsg6+|P2G-5?1sCyxQF2t+GSXYyLYg{KUI>5LZ=ON%}P$G1qzX<T9p)jz6-b8y5m}g>zec504m64XDrb`h8nV*P"
    "e3pkWL(QxCMn2Y9M>lI?DKK>)hPpbQU+PgKgd-JSq8t5akk=WIV(brFD|h<_8-e-T!eb|41h&v7pN>`EV58Vo#8b;FWcH({1)=lPBfkrMnvRr0j4+!"
    "^Xk|0V?Hk~o>eE8Cv{$e$B*?~1v*+hdzn8kPd;iWZ%<Dxh0|voxUZkGZhQKN>+&{0`E<E>xu*BeU;gs4<XWt%aP6)xOjDF6&%-mQ-aS!DgHnnCRY-<"
    "S6hJbq<sB;2ngg8`Xh<O_%|neOiwbQ?uma5_D%imsxl5Yn4j3oHZ|5dw+m7ZL#5V=jQKqP34ScHT8RMXND$|rf$w!kGD@Z%-!~~Y7&>T_DCKVhSz>~"
    "Og{uSy%0D{cp5!obC@Rdl)vtX|@kQV!SN2|4yfI4*SkH(p7r81|P&NQCs%*+av7Z!}`u*L#%bDoL7OwiEaB(F0zBJfe;n0NjxL*dPg8Btm?m>m%o8S"
    "ithI6hvox%mtBg!N}xaLkg73=eBC2A!E}@+PwF1ys2@^WdJJ9o4PLb2{S+T=G88(O{crOPV=D#i>#A!gvP9JHPhF@a+=HZw1+t5VEIDMY$pC&HS5kU"
    "h1>@<l<}ihH1wOJcTTuLno2Tj?P+LHXQ2qDlAXGO6Q+8LVhX5u_J$|B=?kwB|`E|We?`r8<XmY*7C@uj<biT=KNqvF=Cv>$RUsHk~S0K$go5oD}`2a"
    "VF1i`QgNz+si8Q$S}vYa4yM{Q8!cp&p;K{Xs%J{`TBCP`9f_?_k>qkdOC4cHOkV?SJb_pw8>-RhlnY8``K?aoD;+@?J>i~-5>@|FrB3f{^grsuG%e}"
    "G+~xt>&1bcb^$A9q41$w89y2bgj&it&=_F&8Noj!o%oJL=goFT)px6!B-;A>;St)*!FsTnQPDgTB+2ksBc%!gR;t^5gw@&;|$D|QOyjMvOteeEh#Rv"
    "$JoPY6h8V^vOHforPip@02zCY^%7nE2N5>ovoMf^9zk;q8rF-R;4ab_HOt{g)Y#&eTR(`rBz`={WTN*v&btVm|ec3X9fq|jN6iMp5yndzxd=|;c>Nh"
    "J*!<C@qI*(uQyXF|MCAeN32hp;~@Wkew4i=6NI(pv@NFbR!2Y48K%9m4jWF&RuuoSCBJ+mKW${rdlOvr$rC)nKfeQg+a$#s-6WJq+})5_<X$tK<1F*"
    "%|2)dt7g&V^T0NGs(InCyj6yC!&9Moe!BPf-_%dd;|$_NnwmtmW=X|yo7y9>caMS1toQ#mrIY+S(2E!mMdhY>w=j#mqg#)3j37hDl^y#m}(Q01A`#y"
    "%($=PX7<l8!TZ!n0HK_nDc||*nX_v#6*y(MqEVlZTB)Ars6~bpD^x{K6vc;yPDLywnA$6PiHn$2GL|GYaJPWV=x$JO$;>2)`E$Zkq*3xaX27nJfh|)"
    "JX451t+E5lLmnx*Nn_`7eHi%kF<8{@!Jp+qLl5+^tN1IiH?bA!HQHjtt=1lKf|1l*mE#wJOD|g49p)w)6sAo_jjDp8_1UPK!KW;Ujxq`Vcnb;SUfY|"
    "iK96$A#GHOQSCtY7l#;%mbl;K<hXS4n$?1jX|gDC9|w3wc14k=BY+$IVZli_|*JYw%j4~GSHJqmpxpdtI^JDB-pAts4tZlj9K>q(P8&~CY;^VgM3=B"
    "C&!8LfTtf8ErRLp!uXJG4VPv_m_zLp!uXJG4VPv_m_z|Mm7Sn@xl~"
)  # fmt: skip


class Grid(NamedTuple):
    """A codebook of `size` vectors with `length` digits each, and the level of each digit."""

    size: int
    length: int
    levels: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits per digit."""
        return (len(self.levels) - 1).bit_length()


_THREE = (8, 25, 43)
GRIDS = {
    "iq2_xxs": Grid(256, 8, _THREE),
    "iq2_xs": Grid(512, 8, _THREE),
    "iq2_s": Grid(1024, 8, _THREE),
    "iq3_xxs": Grid(256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3_s": Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "iq1": Grid(2048, 8, (-1, 0, 1)),  # for iq1_s and iq1_m
}

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1, doubled; there is no -0 among integers
SIGNS = tuple(s | (s.bit_count() & 1) << 7 for s in range(128))  # seven signs, plus one for even parity


@functools.cache
def digits(name: str) -> Array:
    """The vectors of a grid as digits: uint8 [size, length]."""
    import base64  # lazy: few models use these types
    import zlib

    ends = dict(zip(GRIDS, itertools.accumulate(g.size for g in GRIDS.values()), strict=True))
    grid = GRIDS[name]
    low, high = np.frombuffer(zlib.decompress(base64.b85decode(_DISTANCES)), np.uint8).reshape(2, -1).astype(np.int64)
    numbers = np.cumsum((low + 256 * high)[ends[name] - grid.size : ends[name]])
    powers = len(grid.levels) ** np.arange(grid.length)
    return (numbers[:, None] // powers % len(grid.levels)).astype(np.uint8)


@functools.cache
def words(name: str) -> tuple[int, ...]:
    """Each vector of a grid as one integer, `bits` bits per digit, first digit lowest."""
    grid = GRIDS[name]
    return tuple((digits(name).astype(np.int64) << grid.bits * np.arange(grid.length)).sum(1).tolist())
