"""What `math` and `strict_math` call right: answers in many notations, and answers that place bets or take themselves back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer, Verifier
from mgrpo.rewards.verifiers.mathematics import Math, StrictMath
from mgrpo.rewards.verifiers.open_instruct_math import MathOpenInstruct

MINERVA = "Final Answer: The final answer is {}. I hope it is correct."

# An answer and a label that it is.
RIGHT = [
    (r"\frac{\pi}{4} \text{ radians}", r"\frac\pi4"),
    (r"\color{red}{11}", "11"),
    (r"0.1\overline{6}", "1/6"),
    (r"(a,b)=(3,4)", "(3,4)"),
    (r"2\sqrt{2}", r"$\sqrt{8}$"),
    ("1234", r"1{,}234"),
    (r"\$1,234.50", "1234.5"),
    (r"5\$", "5"),
    (r"50\%", "0.5"),
    ("5 units", "5"),
    (r"\text{(C)}", "C"),
    ("2^{2^{4}}", "65536"),
    ("x+1,", "1+x"),
    ("9^{9^{9^9}}", "9^{9^{9^{9}}}"),
    (r"\frac{1}{2}", "0.5"),
    ("0.50", r"\frac12"),
    (".5", "1/2"),
    (r"\dfrac{2}{4}", r"\tfrac12"),
    (r"-\frac12", r"\frac{-1}{2}"),
    ("3/4", "0.75"),
    ("1 1/2", "1.5"),
    (r"1\frac12", "1.5"),
    ("50%", "0.5"),
    (r"50\%", "50"),
    (r"12.5\%", r"\frac18"),
    ("5 cm", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\,\text{cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    (r"5 \mathrm{~m/s}", "5"),
    (r"5\text{ m}", "5"),
    (r"5 \text{ square inches}", "5"),
    ("12 apples", "12"),
    (r"5\ \text{km/h}", "5"),
    (r"\$18.90", "18.9"),
    ("$18.90", "18.90"),
    (r"18\text{ dollars}", "18"),
    ("€5", "5"),
    ("18 cents", "18"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    (r"1,\!234,\!567", "1234567"),
    ("x=1,234", "1234"),
    ("1,234.50", "1234.5"),
    (r"2.5\times 10^{3}", "2500"),
    (r"2.5 \cdot 10^3", "2500"),
    ("2.5e3", "2500"),
    ("10^{-2}", "0.01"),
    ("1e-3", "0.001"),
    (r"2\sqrt{2}", r"\sqrt 8"),
    ("2sqrt(2)", r"\sqrt8"),
    ("√8", r"2\sqrt2"),
    (r"\frac{\sqrt2}{2}", r"\frac1{\sqrt2}"),
    (r"\pi", "3.14159265"),
    ("2π", r"2\pi"),
    (r"90^\circ", "90"),
    ("90°", "90"),
    (r"90\text{ degrees}", "90"),
    (r"90^{\circ}", r"90^\circ"),
    (r"25^\circ\text{C}", "25"),
    (r"\left[0,1\right)", "[0,1)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"),
    ("x>2", r"(2,\infty)"),
    (r"x \ge 2", r"[2,\infty)"),
    (r"2 \le x", r"x \ge 2"),
    (r"x\geq 5", r"x \geq 5"),
    (r"-2\le x\le 7", "[-2,7]"),
    (r"x\in[-2,7]", "[-2,7]"),
    (r"\geq 5", r"\geq 5"),
    (r"\text{at least }5", r"\text{at least } 5"),
    ("5 or more", "5 or more"),
    ("x≥5", r"x\ge5"),
    (r"\{2,1\}", r"\{1,2\}"),
    ("1,2", "2,1"),
    ("1, 2", r"\{1,2\}"),
    ("1 and 2", "1,2"),
    (r"1\text{ and }2", r"\{1,2\}"),
    (r"1 \text{ or } 2", "1,2"),
    (r"\emptyset", r"\varnothing"),
    ("(1,2)", "(1,2)"),
    ("( 1, 2 )", "(1,2)"),
    (r"\left(\frac12,3\right)", "(0.5,3)"),
    (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    ("(100,200)", "(100,200)"),
    ("(2,1),(1,2)", "(1,2),(2,1)"),
    ("(1,2) and (2,1)", "(1,2),(2,1)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
    (r"\begin{pmatrix}1\\0.5\end{pmatrix}", r"\begin{pmatrix}1\\\frac12\end{pmatrix}"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x=5", "x=5"),
    ("x = 2+3 = 5", "5"),
    ("x = 2+3 = 5", "x=5"),
    ("2+3=5", "5"),
    ("x=y=5", "5"),
    ("f(3)=5", "5"),
    ("a+b=5", "5"),
    ("f(x)=2x+1", "2x+1"),
    ("2x+1", "f(x)=2x+1"),
    ("y=2x+1", "y=2x+1"),
    ("y=2x+1", "y = 1+2x"),
    ("y=(x+1)^2=x^2+2x+1", "y=(x+1)^2"),
    ("x^2+y^2=1", "x^2+y^2=1"),
    ("x=1,y=2", "x=1, y=2"),
    ("x=1,y=2", "(1,2)"),
    ("x=1 or x=-1", r"\pm 1"),
    (r"x=\pm1", "1,-1"),
    (r"1\pm\sqrt2", r"1+\sqrt2,1-\sqrt2"),
    (r"x\neq 5", r"x \neq 5"),
    (r"\frac13\approx 0.333", r"\frac13"),
    ("~5", "5"),
    (r"3\text{ apples} + 100", "103"),
    ("10_2", "10_2"),
    ("10_{2}", "10_2"),
    ("12_7", "12_7"),
    (r"\text{(B)}", "B"),
    ("(B)", "B"),
    (r"\textbf{(B)}", "B"),
    (r"\text{A}", "A"),
    ("C.", "C"),
    (r"\text{Yes}", "yes"),
    (r"\text{no solution}", "no solution"),
    ("No solution", r"\text{no solution}"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\text{east}", "east"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(x+1)(x-1)", "x^2-1"),
    ("2+3i", "3i+2"),
    ("e^2", "e^{2}"),
    (r"\ln 2", r"\ln(2)"),
    (r"\log_2 8", "3"),
    ("10!", "3628800"),
    (r"\binom{10}{5}", "252"),
    ("2^{10}", "1024"),
    ("2**10", "1024"),
    ("2*3", "6"),
    (r"\infty", r"+\infty"),
    ("10:30", "10:30"),
    ("3:4", "3:4"),
    ("+5", "5"),
    ("7.", "7"),
    ("007", "7"),
    ("5.0", "5"),
    ("0.333333", r"\frac13"),
    (r"0.\overline{3}", r"\frac13"),
    (r"\frac{x}{2}", "x/2"),
    (r"\frac12x", r"\frac{x}{2}"),
    (r"\boxed{7}", "7"),
    (r"\angle ABC=90^\circ", "90"),
    ("|AB|=5", "5"),
    (r"\text{The answer is }6", "6"),
    (r"\text{Area}=6", "6"),
    (r"6\text{ ways}", "6"),
    (r"5\text{ ft }3\text{ in}", r"5 \text{ ft } 3 \text{ in}"),
    ("x=3;y=4", "x=3,y=4"),
    ("5 wrong answers", "5"),
    ("5 million", "5000000"),
    (r"5\text{ million}", "5,000,000"),
    ("1.5 million", "1500000"),
    ("5 million", "5 million"),
    (r"\$5\text{ million}", "5000000"),
    (r"5\text{ million dollars}", "5000000"),
    ("3 dozen", "36"),
    (r"3\text{ dozen}", "36"),
    ("5 thousand", "5000"),
    ("2 hundred thousand", "200000"),
    ("50 percent", "0.5"),
    ("50 percent", "50"),
    (r"50\text{ percent}", r"50\%"),
    ("5 hours", "5 hours"),
    ("5 hours", "5"),
    ("5", r"5\text{ hours}"),
    (r"5\text{ hrs}", r"5\text{ hours}"),
    (r"5\text{ cm}", r"5\text{ centimeters}"),
    (r"5\text{ apples}", r"5\text{ pears}"),
    (r"5\text{ square meters}", r"5\text{ m}^2"),
    (r"5\text{ m}^2", r"5\text{ m}^{2}"),
    (r"90^\circ", r"90\text{ degrees}"),
    (r"\$5", "5 dollars"),
    (r"60\text{ km/h}", r"60\text{ km/h}"),
    ("60 miles per hour", "60 mph"),
    ("60 miles per hour", "60 miles/hour"),
    (r"60 \text{ mph}", r"60 \text{ miles}/\text{hour}"),
    ("10 meters per second", "10 m/s"),
    ("10", "10 m/s"),
    (r"10\text{ m/s}", "10 metres per second"),
    ("25 cm squared", "25 cm^2"),
    ("25 square centimeters", "25 cm²"),
    (r"25\text{ cm}^2", "25 centimeters squared"),
    ("25 cm cubed", "25 cm^3"),
    (r"25\text{ cm}^3", "25 cubic centimeters"),
    ("80 kmh", "80 km/h"),
    ("80 kph", r"80\text{ km/hr}"),
    ("80 kilometers per hour", "80 km/h"),
    ("9.8 meters per second squared", r"9.8\text{ m/s}^2"),
    (r"5\text{ g/cm}^3", "5 grams per cubic centimeter"),
    ("5 dollars per hour", r"\$5 per hour"),
    ("5 gallons per person", "5 gallons"),
    ("5000000", "5 million"),
    ("1 million", "10^6"),
    ("5 thousands", "5000"),
    (r"5\%", "5 percent"),
    ("12 hundredths", "12 hundredths"),
    ("100 students", "100"),
    (r"0.25\text{ million}", "250000"),
    ("1,200 thousand", "1200000"),
    (r"\frac{1}{2}\text{ million}", r"\frac{1}{2}\text{ million}"),
]

# An answer and a label that it is not.
WRONG = [
    (r"11 \to 23", "23"),
    (r"11 | 23", "23"),
    (r"11 \\ 23", "23"),
    (r"11 \vee \frac{1}{2}", "0.5"),
    ("1234", "1.234"),
    ("99999999999999999998", "99999999999999999999"),
    ("3/4", "0.57"),
    (r"3\frac{1}{2}", "1.5"),
    (r"50\%", "0.05"),
    ("5 m^2", "5"),
    ("1, 234", "1234"),
    ("2.5e3", "250"),
    (r"\sqrt{2}", "1.41"),
    ("3.14", r"\pi"),
    (r"2\pi r", r"2\pi"),
    ("[0,1]", "[0,1)"),
    (r"(2,\infty)", r"(3,\infty)"),
    (r"x \ge 2", r"(2,\infty)"),
    ("x > 5", r"x \geq 5"),
    ("x<5", "x>5"),
    ("x>5", "5"),
    (r"\geq 5", "5"),
    (r"x \ge 5", "5"),
    ("(2,1)", r"\{1,2\}"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    ("1,2,3", "1,2"),
    ("1,2", "1"),
    ("1,2", "2"),
    (r"\{1\}", "2"),
    ("(2,1)", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    ("(100,200)", "100200"),
    ("(1,2)", "(1,2),(2,1)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("y=5", "x=5"),
    ("x=11=23", "23"),
    ("x=11=23", "11"),
    (r"x=11\text{ }=23", "11"),
    (r"x=11\text{ }=23", "23"),
    ("11=23", "23"),
    ("11=23", "11"),
    ("x^2+y^2=2", "x^2+y^2=1"),
    ("1", "x^2+y^2=1"),
    ("x=1,y=2", "(2,1)"),
    (r"\pm 1", "1"),
    ("5=x", "5"),
    ("11a+c", "7=11a+c"),
    (r"\neq 5", "5"),
    (r"\not= 5", "5"),
    (r"\ne 5", "5"),
    (r"x\neq 5", "x=5"),
    (r"\approx 5", "5"),
    (r"x\approx 5", "5"),
    (r"11\approx 23", "23"),
    (r"\sim 5", "5"),
    ("5 or more", "5"),
    ("at least 5", "5"),
    (r"\text{at most }5", "5"),
    ("about 5", "5"),
    ("not 5", "5"),
    ("maybe 5 or 6", "5"),
    ("maybe 5 or 6", "6"),
    ("maybe 5 or 6", "5,6"),
    ("between 5 and 6", "5"),
    ("between 5 and 6", "6"),
    (r"5 \text{ is wrong}", "5"),
    ("more than 5", "5"),
    ("5+", "5"),
    ("5-6", "5"),
    ("5 to 6", "5"),
    ("5 to 6", "6"),
    ("5?", "5"),
    ("5 6", "56"),
    ("5 6", "6"),
    ("5 6", "30"),
    ("5 6", "11"),
    (r"3\text{ apples} + 100", "3"),
    (r"37\text{ or }41=53", "37"),
    (r"37\text{ or }41=53", "53"),
    (r"37\text{ or }41=53", "41"),
    ("10_2", "2"),
    ("10_2", "10"),
    ("12_7", "12_8"),
    ("1011_2", "11"),
    ("B", "A"),
    ("A, B", "A"),
    ("A or B", "A"),
    (r"\text{west}", "east"),
    ("x+1", "x-1"),
    ("4c", "4"),
    ("4x", "4"),
    ("i", "-i"),
    (r"-\infty", r"\infty"),
    ("-5", "5"),
    ("0.33", r"\frac13"),
    ("1000001", "1000000"),
    ("[0,2]", "1"),
    ("-[0,1)", "1"),
    ("", "7"),
    (r"\frac{1+\sqrt5}{2}", "2"),
    (r"\triangle ABC", "ABC"),
    (r"6\text{ or }7", "6"),
    (r"\text{6 or 7}", "6"),
    (r"5\text{ ft }3\text{ in}", "5"),
    ("x=3, y=4", "3"),
    (r"x = 3 \quad y = 4", "3"),
    (r"5\quad 6", "5"),
    (r"5\quad 6", "6"),
    ("5 million", "5"),
    (r"5\text{ million}", "5"),
    (r"5\text{ thousand}", "5000000"),
    (r"3\text{ dozen}", "3"),
    ("5", "5 million"),
    (r"\frac{1}{2}\text{ million}", "0.5"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}", r"5\text{ cm}^2"),
    (r"5\text{ hours}", r"5\text{ minutes}"),
    (r"\$5", r"5\text{ cents}"),
    ("5 hours", "5 days"),
    (r"5\text{ square meters}", r"5\text{ meters}"),
    (r"90^\circ", r"90\text{ radians}"),
    (r"60\text{ km/h}", r"60\text{ km}"),
    ("60 miles per hour", "60 km/h"),
    ("60 miles per hour", "60 miles"),
    ("25 cm squared", "25 cm cubed"),
    ("10 m/s", "10 meters per second squared"),
    ("6 feet", "6 inches"),
    (r"5\text{ kg}", r"5\text{ g}"),
    ("5 hundred", "5"),
    (r"5\text{ km}", r"5\text{ miles}"),
]

# Sentences that state 42 beside words of denial, and sentences that deny or question it.
AFFIRMED = r"""
It is not 41 but \boxed{42}.
What is wrong with this? Nothing. \boxed{42}
Not only is it even, it is \boxed{42}.
It is not hard to see that the answer is \boxed{42}.
It is not hard to see that the answer is 42.
The answer is not obvious, but it is \boxed{42}.
The answer is not 41; it is 42.
I was wrong before: the answer is $42$.
I was wrong before; the answer is \boxed{42}.
I do not think we need more. The answer is 42.
No doubt the answer is 42.
I do not doubt that the answer is \boxed{42}.
There is no doubt: \boxed{42}
Without loss of generality the answer is \boxed{42}.
There are no other solutions, so the answer is $42$.
The answer is nothing but $42$.
The answer is none other than \boxed{42}.
\boxed{42} is not wrong.
\boxed{42}, not 41.
\boxed{42}. The value 41 is wrong.
\boxed{42} (and not 41)
The answer is 42, not 41.
The answer is 42 and nothing else.
so the least value is $42$
so the least value is \boxed{42}
The smallest number greater than 41 is $42$.
so the smallest number greater than 41 is 42
The number of wrong answers is \boxed{42}.
The number of wrong answers is 42.
The penalty for a wrong answer is \boxed{42}.
The number that is not in the list is \boxed{42}.
The number that is not in the list is $42$.
The total number of students who do not play is $42$.
The only number which does not divide it is 42.
If x is not 0, then \boxed{42}.
Do not forget the sign: \boxed{42}
We get \boxed{42}, which is not divisible by 4.
We get \boxed{42} which is not divisible by 4.
It cannot be 41, so it must be \boxed{42}.
It cannot be 41. The answer must be 42.
The answer is 42 but it was not easy.
The answer is $42$ but not $41$.
The maximum is no more and no less than it should be: \boxed{42}
Why not? \boxed{42}
Nothing is wrong here and \boxed{42} is right.
I am not sure why, but \boxed{42} is right.
It isn't 41, it's \boxed{42}.
The answer isn't 41. It's $42$.
At least one of them is needed, so we have \boxed{42}.
The more the better: \boxed{42}
More than half of them pass, so $42$.
The values that x cannot equal are \boxed{42}.
The value that x cannot be is \boxed{42}.
The outcomes that are not possible are \boxed{42}.
The number that is not a solution is \boxed{42}.
The value that isn't a solution is \boxed{42}.
The one which is not the right answer is \boxed{42}.
So x cannot be \boxed{42}.
So x \neq \boxed{42}.
The largest amount that you cannot make is \boxed{42}.
The largest amount that cannot be made is $42$.
The number of integers that are not multiples of 3 is \boxed{42}.
The probability that it does not rain is \boxed{42}.
So the number of false statements is \boxed{42}.
There are \boxed{42} wrong answers.
He gave 42 wrong answers.
The chance of an incorrect answer is 42.
The number of questions he got wrong is \boxed{42}.
The number of students who didn't pass is 42.
A simple check shows that 41 is not right and that \boxed{42} is.
\boxed{42} is not a multiple of 4.
\boxed{42} is impossible to improve on.
\boxed{42} (not 41)
Nothing else than \boxed{42} works.
No number other than \boxed{42} works.
We don't have 41, we have \boxed{42}.
My first answer was wrong. The answer is \boxed{42}.
Wait, that is wrong. It is \boxed{42}.
Not bad: \boxed{42}
41 is wrong, 42 is right. The answer is \boxed{42}.
The answer is therefore not a fraction but $42$.
It is \boxed{42}. That is not obvious.
It is \boxed{42}; is that not nice?
Is the answer 41? No: it is 42.
The answer is 42, which is not prime.
The answer is $42$, which is not prime.
The answer is $42$ which is not prime.
**The answer is 42.** I hope this is not wrong!
The sum cannot exceed 43 and the answer is 42.
It does not matter which; the answer is 42.
The number not in the list is 42.
I can't see any other way. The answer is 42.
The remaining ones don't matter, so the total is $42$.
\boxed{42} is the answer; anything else is wrong.
Not counting the zero, there are \boxed{42} of them.
without the zero there are \boxed{42}
Except for one, all are odd, so \boxed{42}.
That was not hard! \boxed{42}
There is nothing wrong with \boxed{42}.
Neither 40 nor 41 but \boxed{42}
This is not only nice but also right: \boxed{42}
Since it is never odd, the answer is $42$.
the minimum is not less than 42 and thus it is \boxed{42}
$\boxed{42}$ is impossible.
\boxed{42} is not possible.
So the wrong number is $\boxed{42}$.
x cannot be anything other than $\boxed{42}$
It isn't anything other than $\boxed{42}$
The smallest positive integer not equal to the sum is $\boxed{42}$
the largest number that cannot be the sum is $\boxed{42}$
the value that can't be the result is \boxed{42}
""".strip().split("\n")
DENIED = r"""
It is not \boxed{42}.
\boxed{42} is wrong
\boxed{42} is wrong.
The answer is anything but $42$.
The answer is anything but 42.
The answer is anything but \boxed{42}.
I do not think the answer is 42
I do not think the answer is \boxed{42}
I don't believe that the answer is $42$.
The wrong answer is 42
The wrong answer is \boxed{42}
The incorrect answer would be 42.
It isn't \boxed{42}.
It is not equal to \boxed{42}.
The answer cannot be \boxed{42}.
The answer can't be 42.
The answer is definitely not $\boxed{42}$.
It is not true that the answer is \boxed{42}.
It is false that the answer is 42.
It would be wrong to say that it is \boxed{42}.
\boxed{42} is not the answer.
\boxed{42} is not correct.
\boxed{42} is incorrect.
$\boxed{42}$ would be wrong.
\boxed{42} can't be right.
\boxed{42} isn't right.
\boxed{42} cannot be the answer.
I doubt that the answer is 42.
I am not sure that the answer is 42.
It is never \boxed{42}.
The answer is something other than \boxed{42}.
The answer is 41 rather than \boxed{42}.
Is it \boxed{42}?
\boxed{42} is a wrong answer.
The answer isn't $42$.
It is not $42$.
$42$ is wrong.
42 is wrong
42 is not the answer.
The answer is: not 42.
Not 42.
**Not** \boxed{42}
It is not: \boxed{42}
I would not say \boxed{42}.
We never get \boxed{42} hmm
\boxed{42}. No.
\boxed{42}! Wrong!
\boxed{42} (wrong)
\boxed{42} (that is wrong)
\boxed{42} is obviously wrong.
\boxed{42} is clearly not the right answer.
\boxed{42} must be wrong.
\boxed{42} cannot be right.
\boxed{42} which is wrong.
\boxed{42}, which is wrong.
\boxed{42} is false.
\boxed{42} isn't it.
It's not \boxed{42}.
That's not $\boxed{42}$.
The answer isn’t \boxed{42}.
I don’t think it is \boxed{42}.
That's not the answer: it is not \boxed{42}
The answer is by no means \boxed{42}.
The answer is not $\boxed{42}$
\[ \text{not } \boxed{42} \]
It is incorrect that it equals \boxed{42}.
I can't believe the answer is \boxed{42}.
A common wrong answer is \boxed{42}.
$42$ is not the answer
it is not 42
the result is $42$, but that is wrong
everything but \boxed{42}
It is something that cannot be \boxed{42}
The wrong result is \boxed{42}
x is not equal to \boxed{42}
""".strip().split("\n")

# Verdicts and choices, each with whether the words around it, which may be about a claim, leave it stated.
VERDICTS = [
    (r"So statement $\boxed{C}$ is incorrect.", "C", True),
    (r"\boxed{\text{(D)}} is false.", "D", True),
    (r"the incorrect answer is \boxed{C}", "C", True),
    (r"$\boxed{B}$ (False).", "B", True),
    (r"$\boxed{\text{B}}$. False.", "B", True),
    (r"The one that is not true is \boxed{B}.", "B", True),
    (r"It is not: \boxed{\text{No}}", "No", True),
    (r"Hence it is not possible $\boxed{\text{No}}$", "No", True),
    (r"The claim is not correct \boxed{\text{False}}", "False", True),
    ("\\boxed{\\text{No}}\n\nNo, it cannot", "No", True),
    ("\\boxed{42}\n\nNo, it cannot be odd", "42", True),
    (r"It is not \boxed{C}.", "C", False),
    (r"The answer isn't $\boxed{\text{(C)}}$.", "C", False),
    ("The answer is not C", "C", False),
    (r"\boxed{C} is wrong.", "C", False),
    (r"\boxed{C} is not the answer.", "C", False),
    (r"Is it \boxed{C}?", "C", False),
    (r"It is not \boxed{\text{True}}", "True", False),
]

# A completion, a label that it states, and labels that it only mentions.
STATED: list[tuple[str, list[str], list[str]]] = [
    ("The answer is 7", ["7"], []),
    ("The answer is 7 apples.", ["7"], []),
    ("Answer: 7", ["7"], []),
    ("**Answer:** 7", ["7"], []),
    ("**Answer: 7**", ["7"], []),
    ("The final answer is $7$.", ["7"], []),
    ("The answer is 11 or 23", ["11, 23"], ["11", "23"]),
    ("The final answer is 11. $23$ total of 37", ["11"], ["23", "37"]),
    ("The answer is not 5", [], ["5"]),
    ("The answer isn't 5", [], ["5"]),
    ("The answer is at least 5", [], ["5"]),
    ("The answer is 5 or more", [], ["5"]),
    ("The answer is about $5$", [], ["5"]),
    ("so it is 5 or more", [], ["5"]),
    ("at least 5", [], ["5"]),
    ("it is not $5$", [], ["5"]),
    ("it is $5$ or more", [], ["5"]),
    ("it is $x=7$", ["7"], []),
    (r"it is \(\frac{14}{2}\)", ["7"], []),
    (r"\[ x = 7 \]", ["7"], []),
    ("Thus $$7$$", ["7"], []),
    ("The answer is:\n\\[ 7 \\]", ["7"], []),
    ("The answer is:\n\n7", ["7"], []),
    ("## Final Answer\n\n7", ["7"], []),
    ("first $7$, then $8$", ["8"], ["7"]),
    ("7, or rather 8", [], ["7"]),
    ("no idea", [], ["7"]),
    ("", [], ["7"]),
    ("x^2 + 1", ["1+x^2"], []),
    ("cab", [], ["abc"]),
    ("(1+sqrt(5))/2", [r"\frac{1+\sqrt5}{2}"], ["2"]),
    ("1/2", ["0.5"], ["2"]),
    ("she has 1/2 of it", ["0.5"], []),
    ("Adding 3 and 4 gives 7.", ["7"], ["3"]),
    ("So 3 + 4 = 7 apples", ["7"], []),
    ("She pays $12.", ["12"], []),
    ("She pays $5 and then $7.", ["7"], []),
    ("It costs 5 dollars. I hope that helps!", ["5"], []),
    ("we get $x^2+1$ for all 3 cases", ["x^2+1"], ["3"]),
    ("$3$ and $4$", ["3,4"], ["4"]),
    ("$3$ or $4$", [], ["4"]),
    (r"\boxed{3} no, \boxed{4}", ["4"], ["3"]),
    (r"\boxed{1} and \boxed{2}", ["1,2"], ["2"]),
    (r"\boxed{1},\boxed{2}", [r"\{1,2\}"], []),
    (r"$\boxed{1}$ or $\boxed{2}$", [], ["1"]),
    (r"\boxed{7} The answer is 8", ["7"], ["8"]),
    (r"\boxed{7} $8$", [], ["8"]),
    (r"<think>\boxed{8}</think> 9", ["9"], ["8"]),
    (
        r"\boxed{x=11\text{ }=23} Final Answer: The final answer is 37\text{ or }41=53. I hope it is correct.",
        [],
        ["11", "53", "37"],
    ),
    (r"The answer is 42, since $6\cdot 7=42$", ["42"], []),
    ("The answer is $42$, because $x=3$.", ["42"], []),
    ("Therefore, the number of ways is $12$.", ["12"], []),
    ("The answer is (B).", ["B"], []),
    ("The answer is (B) 12", [], ["12"]),
    ("The correct answer is B", ["B"], []),
    ("The answer is Paris.", ["Paris"], []),
    ("The answer is 3.5", ["3.5"], []),
    ("The answer is 3.5.", ["3.5"], []),
    ("The answer is 1,234.", ["1234"], []),
    ("The answer is 50%.", ["50"], []),
    ("The answer is -5", ["-5"], []),
    ("The answer is $-5$", [], ["5"]),
]


def is_right(verifier: type[Verifier], completion: str, label: object) -> bool:
    return verifier(Reward()).score(Answer(completion=completion, ground_truth=label)) == 1.0


@pytest.mark.parametrize("verifier", [Math, StrictMath])
def test_answers_in_many_notations(verifier: type[Math | StrictMath]) -> None:
    """Right answers without reward teach the label's spelling; rewards for near misses and hedges teach those."""
    places = {Math: r"so \boxed{%s}", StrictMath: MINERVA.replace("{}", "%s")}
    verdicts = [(*case, is_right(verifier, places[verifier].replace("%s", case[0]), case[1])) for case in RIGHT + WRONG]
    assert len(verdicts) > 200
    assert [case[:2] for case in verdicts if case[2]] == RIGHT


def test_the_answer_is_in_one_place() -> None:
    """A completion that is right for every number it mentions needs no reasoning."""
    for completion, stated, mentioned in STATED:
        assert [label for label in [*stated, *mentioned] if is_right(Math, completion, label)] == stated, completion


def test_a_denied_answer_is_not_paid_and_one_beside_words_of_denial_is() -> None:
    """A policy that is paid for denials learns to deny; one that is not paid for "it is not 41 but 42" learns not to explain."""
    assert len(AFFIRMED) >= len(DENIED) > 60
    assert not [text for text in AFFIRMED if not is_right(Math, text, "42")]
    assert not [text for text in DENIED if is_right(Math, text, "42")]
    assert [case for case in VERDICTS if is_right(Math, *case[:2]) != case[2]] == []


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("The town has 5 million people.", "5000000", True),
        ("The town has 5 million people.", "5", False),
        ("The answer is $5$ thousand", "5000", True),
        ("It takes $5$ hours", r"5\text{ hours}", True),
        ("It takes 5 hours", r"5\text{ minutes}", False),
        ("It goes 60 miles/hour.", "60 mph", True),
        ("So it moves at $10$ m/s.", "10 meters per second", True),
        ("Its area is $25$ cm^2.", "25 square centimeters", True),
        ("Its area is 25 cm².", "25 cm^3", False),
        ("The second one takes 5 minutes", r"5\text{ minutes}", True),
    ],
)
def test_words_after_a_number_multiply_it_or_are_its_unit(completion: str, label: str, expected: bool) -> None:
    """The words around a value are looked at in every place where it can stand."""
    assert is_right(Math, completion, label) == expected


# Ways to place bets on two numbers at once, within one answer, and doors through which an answer might be seen.
_BETS = [
    "{}={}", "x={}={}", "{}, {}", "{} and {}", "{} or {}", "{}; {}", "{} {}", r"{}\text{{ }}={}", r"{}\text{{ or }}{}",
    r"{} \approx {}", r"{}\quad {}", r"\{{{}, {}\}}", "({}, {})", "[{}, {}]", "{} to {}", "between {} and {}", "{}+0*{}",
    r"{} \text{{ not }} {}", r"{} \neq {}", r"{} < {}", r"{} \le x \le {}", "x={}, y={}", r"{}\text{{ apples, }}{}", "{}_{}", r"{} \to {}", "{} | {}", r"{} \\ {}", r"{} \Rightarrow {}", r"{} \cup {}", "{} -> {}", "{}...{}",
    r"{}^{{\text{{or }}{}}}", r"\text{{{} or {}}}", "{}\n{}", "{}:{}", r"{}\%={}", "{}. {}",
]  # fmt: skip
_DOORS = [
    r"\boxed{{{}}}", "Final Answer: The final answer is {}. I hope it is correct.", "The answer is {}.", "Answer: {}", "${}$",
    r"\({}\)", r"\[{}\]", "so {} it is", "{}", r"$\boxed {}$", "it is not {}", "## Final Answer\n\n{}", "<think>{}</think>",
    r"\fbox{{{}}}", "$${}$$", "{} apples", "= {}",
]  # fmt: skip
_NUMBERS = [11, 23, 37, 53, 71]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bets_on_several_labels_win_at_most_one(data: st.DataObject) -> None:
    """The sum of a group's chances would be the policy's reward for guessing."""
    numbers = data.draw(st.permutations(_NUMBERS))
    bets = data.draw(st.lists(st.sampled_from(_BETS), min_size=2, max_size=2))
    answers = [bets[0].format(*numbers[:2]), bets[1].format(*numbers[2:4]), str(numbers[4])]
    doors = data.draw(st.lists(st.sampled_from(_DOORS), min_size=1, max_size=3))
    joint = data.draw(st.sampled_from([" ", ", ", "\n", " and ", " or ", ". "]))
    completion = joint.join(door.format(answer) for door, answer in zip(doors, answers, strict=False))
    for verifier in Math, StrictMath:
        won = [number for number in _NUMBERS if is_right(verifier, completion, str(number))]
        assert len(won) <= 1, (completion, won)


SMALL = [r"1.6\times 10^{-19}", r"9.1\times 10^{-31}", r"-1.6\times 10^{-19}", "0.0000012", "0.0000014", r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}",
         "e^{-50}", "e^{-40}", "10^{-9}", "10^{-7}", "0", r"0.00003\%", r"0.00004\%", "(0.0000001, 2)", "(0.0000002, 2)", r"\{0.0000003, 2\}",
         r"\{0.0000004, 2\}", "[0, 0.0000001]", "[0, 0.0000002]", r"\begin{pmatrix}0.0000001\\1\end{pmatrix}", r"\begin{pmatrix}0.0000002\\1\end{pmatrix}",
         r"1.6\times 10^{-19}x", r"9.1\times 10^{-31}x", "e^{-800}", "e^{-900}", "10^{-400}", "10^{-500}", "0.00012345", "0.00012347"]  # fmt: skip


@pytest.mark.parametrize("verifier", [Math, MathOpenInstruct])
def test_small_values_are_told_apart(verifier: type[Verifier]) -> None:
    """Rounded to 6 places, any small number was the right one: a free point in physics, chemistry and probabilities."""
    for answer in SMALL:
        assert [label for label in SMALL if is_right(verifier, rf"\boxed{{{answer}}}", label)] == [answer]


@pytest.mark.parametrize("verifier", [Math, MathOpenInstruct])
@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("0.333333", r"\frac13", True),
        ("0.001001", r"\frac{1}{999}", True),
        ("0.000123457", "0.0001234567", True),
        ("0.00012345", "0.0001234567", False),
        (r"1.66054\times 10^{-27}", r"1.66053907\times 10^{-27}", True),
        (r"1.6605\times 10^{-27}", r"1.66053907\times 10^{-27}", False),
        (r"\frac{16}{10^{20}}", r"1.6\times 10^{-19}", True),
        (r"16 \cdot 10^{-20}", r"1.6\times 10^{-19}", True),
        (r"0.01\%", "0.0001", True),
        (r"\sqrt{2}^2-2.0", "0", True),
        ("602200000000000000000000", r"6.022\times10^{23}", True),
        (r"6022\cdot 10^{20}", r"6.022\times10^{23}", True),
        ("602200000000000000000001", r"6.022\times10^{23}", False),
        (r"1.1\times10^{17}", "110000000000000000", True),
        (r"1.1*10^{17}", "110000000000000001", False),
        (r"1.1\times10^{17}, 2", "2, 110000000000000000", True),
        (r"(1.1\times10^{17}, 2)", "(110000000000000000, 2)", True),
        (r"\frac{1.1\times10^{17}}{2}", "55000000000000000", True),
        ("125,000", r"1.25\times10^5", True),
        (r"2^{1.1\times 10^1}", "2048", True),
    ],
)
def test_decimals_are_compared_relatively_where_they_are_small_and_exactly_where_they_are_whole(
    verifier: type[Verifier], answer: str, label: str, expected: bool
) -> None:
    """Decimals times powers of ten were floating-point numbers, which no large whole number equals."""
    assert is_right(verifier, rf"\boxed{{{answer}}}", label) == expected
    assert is_right(verifier, rf"\boxed{{{label}}}", answer) == expected


@pytest.mark.parametrize(
    ("completion", "stated", "others"),
    [
        ("<answer>73</answer>", ["73"], []),
        ("<answer> 73 </answer>", ["73"], ["72"]),
        ("reasoning\n</think>\n<answer>73</answer>", ["73"], []),
        ("<think>It is 72.</think><answer>73</answer>", ["73"], ["72"]),
        (r"<answer>\frac{1}{2}</answer>", [r"\frac12"], ["2"]),
        ("<answer>73 apples</answer>", ["73"], []),
        ("<answer>The answer is 73</answer>", ["73"], []),
        (r"<answer>$x = 73$</answer>", ["73"], []),
        (r"<answer>\boxed{73}</answer>", ["73"], []),
        (r"\boxed{73} <answer>73</answer>", ["73"], []),
        ("<Answer>73</Answer>", ["73"], []),
        ("The 72 is first. <answer>73</answer> I hope that the 74 helps.", ["73"], ["72", "74"]),
        ("<answer>72</answer> <answer>73</answer>", ["73"], ["72"]),
        ("Between <answer> tags: <answer>73</answer>", ["73"], []),
        ("<answer>72 or 73</answer>", ["72, 73"], ["72", "73"]),
        ("<answer>about 73</answer>", [], ["73"]),
        ("<answer>73</answer> is wrong", [], ["73"]),
        ("<answer>73", [], ["73"]),
        ("<answer></answer> 73", [], ["73"]),
        ("We add.\n#### 1,073", ["1073"], []),
        ("It is $72$, then one more.\n#### 73", ["73"], ["72"]),
        ("#### 1. First\nThe answer is 73.", ["73"], ["1"]),
    ],
)
def test_tags_and_gsm8ks_last_line_are_places(completion: str, stated: list[str], others: list[str]) -> None:
    """Templates ask for `<answer>` tags, and with them every answer was wrong."""
    assert [label for label in [*stated, *others] if is_right(Math, completion, label)] == stated


def test_tags_are_a_place_of_the_other_readings_as_well() -> None:
    """`strict_math` asks for nothing but the answer; `math_open_instruct` took the tags for text."""
    for verifier in StrictMath, MathOpenInstruct:
        assert is_right(verifier, "<answer>73</answer>", "73")
        assert not is_right(verifier, "<answer>72</answer>", "73")
    assert not is_right(StrictMath, "So it is <answer>73</answer>", "73")
    assert is_right(MathOpenInstruct, "So it is <answer>73</answer>", "73")


THOUGHTS = [
    ("<think>", "</think>"), ("<Think>", "</THINK>"), ("<think >", "</think >"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷"),
]  # fmt: skip
"""Tags by which families of models mark their thoughts."""


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (r"\boxed5", "5", True), (r"so $\boxed5$.", "5", True), (r"So \boxed12.", "12", True), (r"\boxed-1.5, of course", "-1.5", True),
        (r"$\boxed\frac12$", r"\frac12", True), (r"$\boxed\pi$", r"\pi", True), (r"\boxed{4}. Rather \boxed5", "5", True),
        (r"\boxed5. Rather \boxed{4}", "5", False), (r"\boxed{4} or \boxed5", "5", False), (r"\boxed5", "6", False),
        (r"\boxed{7", "8", False), (r"\boxed{4} so the box \boxed\{4\} ok", "4", True),
    ],
)  # fmt: skip
def test_a_box_without_braces_holds_its_number(completion: str, label: str, expected: bool) -> None:
    """LaTeX draws a box around what follows."""
    assert is_right(Math, completion, label) == expected


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        (r"e^{i\pi}", "-1", True), ("-1", r"e^{\pi i}", True), (r"e^{2\pi i}", "1", True), (r"e^{i\pi/2}", "i", True),
        (r"e^{\frac{i\pi}{2}}", "i", True), (r"2e^{i\pi/3}", r"1+\sqrt3 i", True), (r"e^{ix}", r"\cos x+i\sin x", True),
        (r"e^{i\pi}", "1", False), (r"e^{i\pi/2}", "-i", False), (r"e^{i\pi/3}", r"\frac12-\frac{\sqrt3}{2}i", False),
        ("e^{in}", "e^{-in}", False), ("i^2", "-1", False), ("[0, e^{i}]", "4", False), ("x<e^{i}", "4", False),
        ("(1, e^{2i})", "(1, e^{2i})", True),
    ],
)  # fmt: skip
def test_i_is_the_imaginary_unit_beside_a_power_of_e(answer: str, label: str, expected: bool) -> None:
    """math-verify reads it as a variable."""
    assert is_right(Math, rf"\boxed{{{answer}}}", label) == expected


@pytest.mark.parametrize("verifier", [Math, StrictMath, MathOpenInstruct])
def test_a_thought_that_never_ends_states_nothing(verifier: type[Verifier]) -> None:
    """Paid for boxes in thoughts, a policy learns to think until its limit."""
    for text in "<think>so {}", "\n<think>\n{}", "Well. <think>{}", "<think>no</think> 8 <think> no, {}":
        assert not is_right(verifier, text.format(r"\boxed{7}"), "7")
    for begin, end in THOUGHTS:
        assert not is_right(verifier, rf"{begin}\boxed{{7}}", "7")
        assert is_right(verifier, rf"{begin}so{end}\boxed{{7}}", "7")
        # A draft in the thought is no answer; Open Instruct reads it.
        assert is_right(verifier, rf"{begin}\boxed{{7}}{end}8", "7") == (verifier is MathOpenInstruct)
    assert is_right(verifier, r"<think>so</think>\boxed{7}", "7")
    # Formats that prompts ask for, with the answer before the reasons or in them, and tags that a text is about.
    assert verifier is StrictMath or is_right(verifier, r"<answer>7</answer><reasoning>as 3+4</reasoning>", "7")
    assert verifier is StrictMath or is_right(verifier, r"<reasoning>so \boxed{7}</reasoning>", "7")
    assert verifier is StrictMath or is_right(verifier, "<reasoning>3+4\n<answer>7</answer>", "7")
    assert verifier is StrictMath or is_right(verifier, r"In HTML, <thinking> is no tag. \boxed{7}", "7")
    assert is_right(verifier, r"so 8</thinking> \boxed{7}", "7")
    assert not is_right(verifier, r"It begins with `<think>`. \boxed{8}", "7")
    assert verifier is StrictMath or is_right(verifier, r"It begins with `<think>`. \boxed{7}", "7")


@pytest.mark.parametrize("verifier", [Math, MathOpenInstruct])
@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("3{,}5", "3.5", True),
        ("3,5", "3.5", True),
        ("3.5", "3,5", True),
        ("3.5", "3{,}5", True),
        ("3{,}5", "3,5", True),
        ("-0{,}25", r"-\frac14", True),
        ("0,25", r"\frac14", True),
        ("0,125", r"\frac18", True),
        ("1234,567", "1234.567", True),
        ("1.234,5", "1234.5", True),
        ("1.234{,}5", "1234.5", True),
        ("3,6", "3.5", False),
        ("35", "3{,}5", False),
        ("3{,}5", "35", False),
        ("3,500", "3.5", False),
        ("3{,}500", "3500", True),
        ("3,500", "3500", True),
        ("1,2", "1", False),
        ("1,2", "2", False),
        ("5,3", "3,5", True),
        ("3, 5", "3.5", False),
        ("(3{,}5; 2)", "(3.5, 2)", True),
        ("(3,5)", "3.5", False),
        (r"1{,}5\times 10^{3}", "1500", True),
    ],
)
def test_decimal_commas(verifier: type[Verifier], answer: str, label: str, expected: bool) -> None:
    """Most of the world writes 3,5, and LaTeX spells it 3{,}5: that is two numbers only where two are asked for."""
    assert is_right(verifier, rf"\boxed{{{answer}}}", label) == expected


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (r"\boxed{\approx 2.5}", "2.5", True),
        (r"\boxed{≈ 2.5\text{ cm}}", "2.5", True),
        (r"$r \approx 2.5$", "2.5", True),
        (r"\boxed{\sqrt2\approx 1.41}", "1.41", True),
        (r"\boxed{\sqrt2\approx 1.41}", r"\sqrt2", True),
        (r"\boxed{x = \frac13 \simeq 0.33}", "0.33", True),
        (r"\boxed{\sqrt2 \approx 1.414 \approx 1.41}", "1.41", True),
        (r"\boxed{\pi\approx 3,14}", "3.14", True),
        (r"\boxed{\pi\approx 3.14}", r"\pi", True),
        (r"\boxed{\pi\approx 2.5}", "2.5", False),
        (r"\boxed{\sqrt2\approx 1.42}", "1.42", False),
        (r"\boxed{11.5\approx 23.5}", "23.5", False),
        (r"\boxed{2.5\approx 2.6}", "2.6", False),
        (r"\boxed{\approx 2.5}", "2.51", False),
        (r"\boxed{\approx 2.5}", r"\frac52", False),
        (r"\boxed{\approx 5}", "5", False),
        (r"\boxed{x \text{ or } y \approx 2.5}", "2.5", False),
        (r"\boxed{2.4 \text{ or } \approx 2.5}", "2.5", False),
    ],
)
def test_what_follows_a_sign_of_approximation_is_the_answer_where_the_label_is_that_decimal(
    completion: str, label: str, expected: bool
) -> None:
    """A label 1.41 is itself rounded, and its normal answer says so."""
    assert is_right(Math, completion, label) == expected


WORKED = [
    "So it is 12 in all. Final Answer: The final answer is $12$. I hope it is correct.",
    "He has 4+8=<<4+8=12>>12.\n#### 12",
    r"He has $4+8=\boxed{12}$ apples.",
    "He had four of them and was given eight more by his two friends, so the answer is 12.",
    "<think>4 and 8</think><answer>12</answer>",
]


@pytest.mark.parametrize("label", WORKED)
@pytest.mark.parametrize("verifier", [Math, StrictMath, MathOpenInstruct])
def test_labels_that_are_worked_solutions_are_read_where_they_state_their_answer(
    verifier: type[Verifier], label: str
) -> None:
    """No answer was right, and nothing was said at the start."""
    assert verifier.check_label(label) == ""
    assert is_right(verifier, MINERVA.format("12"), label)
    assert not is_right(verifier, MINERVA.format("8"), label)


def test_labels_that_no_answer_meets_are_found_before_the_start() -> None:
    """NaN is how pandas writes a missing value; prose is met by the same prose only."""
    prose = "Every such function is bounded on the interval, and since it is continuous there it has a maximum."
    for verifier in Math, StrictMath, MathOpenInstruct:
        assert "prose" in verifier.check_label(prose)
        assert verifier.check_label(r"\text{the least prime is } 2") == ""
        for missing in math.nan, "nan", "NaN", ["7", math.nan], r"\boxed{nan}":
            with pytest.raises(ValueError, match="ground_truth"):
                verifier.check_label(missing)
            with pytest.raises(ValueError, match="ground_truth"):
                is_right(verifier, r"\boxed{nan}", missing)
