"""A question is decided by a policy that only the teacher reads: it moves into the weights."""

from random import Random

from task import Row, Task

POLICY = """Returns policy.
1. Goods may be returned within 30 days of delivery, unused, for the full price.
2. Used goods may be returned within 14 days for half of the price.
3. Food, and goods made to measure, are never taken back.
4. Broken goods are replaced within 2 years, whatever else is true of them except rule 3.
5. Members have 60 days in place of 30, and 30 days in place of 14.
6. A price above 500 euros is decided by a person: escalate, unless rule 3 denies it.
Answer with one line: decision=<refund|half|replace|deny|escalate> rule=<number>."""
GOODS = {
    "a cheese box": "never",
    "a tea sampler": "never",
    "a tailored jacket": "never",
    "a cut-to-size curtain": "never",
    "a desk lamp": "usual",
    "a backpack": "usual",
    "a coffee mill": "usual",
    "a pair of boots": "usual",
    "a tent": "usual",
    "a bicycle helmet": "usual",
}
RETURN_FORMS = (
    (
        "{who} bought {goods} for {price} euros {days} days ago. It is {state}. What now?",
        "Return request: {goods}, {price} euros, {days} days since delivery, {state}, {who}.",
        "{goods} for {price} euros came {days} days ago and is {state}; the buyer is {who}.",
    ),
    (
        "It has been {days} days since {who} got {goods} ({price} euros). Condition: {state}.",
        "{who}, {days} days after delivery: {goods} is {state}. The price was {price} euros.",
    ),
)


def decide(kind: str, state: str, days: int, price: int, *, is_member: bool) -> str:
    """Returns what the policy says."""
    if kind == "never":
        return "decision=deny rule=3"
    if price > 500:
        return "decision=escalate rule=6"
    if state == "broken":
        return "decision=replace rule=4" if days <= 730 else "decision=deny rule=4"
    limit, outcome, rule = (30, "refund", 1) if state == "unused" else (14, "half", 2)
    if days <= limit:
        return f"decision={outcome} rule={rule}"
    if is_member and days <= {30: 60, 14: 30}[limit]:
        return f"decision={outcome} rule=5"
    return f"decision=deny rule={rule}"


def make_return(rng: Random, is_new: bool) -> Row:
    """Makes a question about a return and the line that the policy asks for."""
    goods, state = rng.choice(list(GOODS)), rng.choice(("unused", "used", "broken"))
    is_member = rng.random() < 0.5
    days = rng.choice(
        (rng.randint(1, 14), rng.randint(15, 30), rng.randint(31, 60), rng.randint(61, 900))
    )
    price = rng.choice((rng.randint(10, 499), rng.randint(10, 499), rng.randint(501, 900)))
    who = "a member" if is_member else "a customer"
    form = rng.choice(RETURN_FORMS[is_new])
    prompt = form.format(who=who, goods=goods, price=price, days=days, state=state)
    answer = decide(GOODS[goods], state, days, price, is_member=is_member)
    return {"prompt": prompt[:1].upper() + prompt[1:], "answer": answer, "group": state}


RETURNS_TASK = Task("returns", make_return, "", max_tokens=24, context=POLICY)
