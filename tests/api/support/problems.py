"""What an answer that refuses a request says."""

import httpx


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of the problem."""
    return answer.status_code, answer.json()["code"]
